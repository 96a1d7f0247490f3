"""`fastdp split`: certificates, the vendor's service, and the customer."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import fastdp.files as files
from fastdp.commands.certificates import add_certificate_commands
from fastdp.commands.contributing import Contributing, show_contributing, show_displacement, with_contributing
from fastdp.commands.progress import bar
from fastdp.commands.refusal import console, errors, quiet_libraries, refusing, style_message
from fastdp.untrusted import load_pretrained, load_pretrained_tokenizer
from fastdp.validate import positive

if TYPE_CHECKING:
    from fastdp import SplitCustomer, TextPrivatizer
    from fastdp.methods.public import PublicText
    from fastdp.methods.sap import CTI, PrivateBottom

split_app = typer.Typer(
    help="Fine-tune a vendor's model on a customer's texts: the texts stay, privatized rows travel.",
    no_args_is_help=True,
)
add_certificate_commands(split_app, "vendor", "customer", default="customer")

_ADDRESS = "localhost:7443"
COUNTS = "counts.pt"
Address = Annotated[str, typer.Option(help="host:port of the vendor")]
Insecure = Annotated[bool, typer.Option("--insecure", help="no TLS and no certificates; on this machine alone")]


@split_app.command("vendor")
@refusing
def vendor_command(
    model: Annotated[str, typer.Option(help="folder or name of the pretrained model that is served")],
    folder: Annotated[
        Path, typer.Option(help="folder for customers' runs and rows; start again with it to go on")
    ] = Path("split-vendor"),
    address: Address = _ADDRESS,
    certificates: Annotated[
        Path | None,
        typer.Option(help="folder of certificates; on this machine it is made if it is not there, for one 'customer'"),
    ] = None,
    insecure: Insecure = False,
    allow: Annotated[
        list[str] | None, typer.Option(help="a customer to let in; by default all with a certificate; may be repeated")
    ] = None,
    classes: Annotated[int, typer.Option(help="classes of the output", min=2)] = 2,
    after: Annotated[
        int, typer.Option(help="blocks in the bottom, which customers get; 0 cuts at the embeddings", min=0)
    ] = 0,
    lora_r: Annotated[int, typer.Option(help="rank of each customer's LoRA adapter", min=1)] = 8,
    max_tokens: Annotated[int, typer.Option(help="most tokens of an example", min=1)] = 512,
    max_batch: Annotated[int, typer.Option(help="most examples of a step", min=1)] = 64,
    threads: Annotated[int, typer.Option(help="torch threads; 0 leaves torch's choice", min=0)] = 0,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="seed of new heads and adapters")] = 0,
) -> None:
    """Serve the top of a model. Each customer trains an adapter of its own over it, and sends no text."""
    quiet_libraries()
    import torch
    from transformers import AutoModelForSequenceClassification

    from fastdp.split.vendor import Limits, SplitVendor, default_lora

    if threads:
        torch.set_num_threads(threads)
    own = None if insecure else _vendor_certificates(certificates, address)
    torch.manual_seed(seed)
    network = load_pretrained(AutoModelForSequenceClassification, model, num_labels=classes, dtype=torch.float32)
    tokenizer = load_pretrained_tokenizer(model)
    if network.config.pad_token_id is None:
        network.config.pad_token_id = tokenizer.eos_token_id
    network.to("cuda" if torch.cuda.is_available() else "cpu")
    vendor = SplitVendor(
        network,
        folder,
        after=after,
        tokenizer=tokenizer,
        lora=default_lora(network, lora_r),
        limits=Limits(max_tokens=max_tokens, max_batch=max_batch),
    )
    with vendor.serve(address, own, insecure=insecure, allowed=frozenset(allow) if allow else None) as service:
        # A plain stop is as good as an interrupt: calls end and runs are kept.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if insecure:
            errors.print(style_message(("warning:", "yellow"), " no TLS: anybody on this machine can be any customer"))
        console.print(f"serving {model} at {service.address}, {classes} classes, {after} blocks in the bottom")
        service.wait()


@split_app.command("customer")
@with_contributing
@refusing
def customer_command(
    folder: Annotated[Path, typer.Option(help="folder for what must survive: run again with it to go on")] = Path(
        "split-customer"
    ),
    address: Address = _ADDRESS,
    certificates: Annotated[Path | None, typer.Option(help="this customer's own folder of certificates")] = None,
    insecure: Insecure = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="folder or name of the published model, for its tokenizer; the vendor sends none")
    ] = None,
    published: Annotated[
        Path | None,
        typer.Option(help="folder of the published model: refuse a vendor whose bottom is not that model's"),
    ] = None,
    fixed_length: Annotated[
        bool,
        typer.Option("--fixed-length", help="fill texts up to --max-tokens with random words, which are privatized"),
    ] = False,
    eta: Annotated[
        float | None, typer.Option(help="privacy parameter in units of 1 / distance; small is private")
    ] = None,
    noise: Annotated[
        Literal["tokens", "rows"], typer.Option(help="replace tokens before the bottom, or add noise to its rows")
    ] = "tokens",
    mechanism: Annotated[
        Literal["laplace", "exponential"] | None,
        typer.Option(
            help="draw tokens by noise and nearest row, or by the exponential mechanism (the default without --cti)"
        ),
    ] = None,
    train: Annotated[Path | None, typer.Option(help="texts and labels to train on: .csv, .tsv, .jsonl")] = None,
    eval: Annotated[
        Path | None, typer.Option(help="texts and labels to measure accuracy on; they are released too")
    ] = None,
    predict: Annotated[Path | None, typer.Option(help="texts to classify")] = None,
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="file for the classes of --predict (.jsonl)")
    ] = None,
    text_column: Annotated[str, typer.Option(help="column with the text")] = "sentence",
    label_column: Annotated[str, typer.Option(help="column with the class, 0, 1, ...")] = "label",
    epochs: Annotated[int, typer.Option(help="passes over the examples", min=1)] = 3,
    batch_size: Annotated[int, typer.Option(help="examples in a step", min=1)] = 32,
    learning_rate: Annotated[float, typer.Option(help="step size of the vendor's AdamW")] = 1e-3,
    max_tokens: Annotated[int, typer.Option(help="longer texts are cut", min=1)] = 64,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="number format of the rows on the wire")
    ] = "float32",
    device: Annotated[str, typer.Option(help="where the bottom runs and draws are made; auto takes a GPU")] = "auto",
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="seed of the order of examples; never of noise")] = 0,
    patience: Annotated[float, typer.Option(help="seconds to wait for a vendor that does not answer")] = 300.0,
    discard: Annotated[
        bool, typer.Option("--discard", help="have the vendor delete the run and the rows first")
    ] = False,
    *,
    counting: Contributing,
) -> None:
    """Train on a vendor's model, or use it, without sending a text. Run it again after a stop and it goes on."""
    quiet_libraries()
    from fastdp.methods.sap import PrivateBottom, TextPrivatizer
    from fastdp.split.customer import SplitCustomer

    positive(patience=patience)
    chosen, epsilon = counting.validated(eta), counting.epsilon
    if output is not None and predict is None:
        raise ValueError("--output is for the classes of --predict: name the texts")
    if chosen and noise == "rows":
        raise ValueError("--cti chooses among tokens: leave out --noise rows, or --cti")
    _check_present(train or eval or predict, eta if epsilon is None else epsilon, tokenizer)
    with SplitCustomer(
        address,
        folder,
        certificates,
        insecure=insecure,
        tokenizer=None if tokenizer is None else load_pretrained_tokenizer(tokenizer),
        published=published,
        fixed_length=fixed_length,
        learning_rate=learning_rate,
        batch_size=batch_size,
        dtype=dtype,
        max_tokens=max_tokens,
        device=device,
        seed=seed,
        patience=patience,
    ) as customer:
        if discard:
            customer.discard()
            console.print("the vendor has deleted the run and the rows")
        if eta is None and epsilon is None:
            return
        labelled = None if train is None else _labelled(train, text_column, label_column)
        counts = _counts(customer, chosen, labelled) if chosen and not chosen.cti_public else None
        if chosen and chosen.cti_public:
            public = _labelled(chosen.cti_public, text_column, label_column)
            private = {path: _texts(path, text_column) for path in (train, eval, predict) if path}
            counts = _counts(customer, chosen, public, chosen.admit(public[0], private))
        privatizer: TextPrivatizer | PrivateBottom
        if noise == "rows":
            assert eta is not None
            privatizer = PrivateBottom(customer.bottom, eta=eta)
        else:
            privatizer = TextPrivatizer(
                customer.bottom.model,
                eta=eta,
                epsilon=epsilon,
                tokenizer=customer.tokenizer,
                mechanism=mechanism or (None if counts else "exponential"),
                cti=counts,
                duplicates="merge",
            )
            show_displacement(privatizer)
        if labelled is not None:
            _train(customer, privatizer, *labelled, epochs)
        if eval is not None:
            _evaluate(customer, privatizer, *_labelled(eval, text_column, label_column))
        if predict is not None:
            _predict(customer, privatizer, _texts(predict, text_column), output)
        console.print(f"wrote {customer.save_statement(privatizer)}")


def _check_present(texts: Path | None, budget: float | None, tokenizer: str | None) -> None:
    """Raise ValueError unless what is needed to send texts is there, if any are named."""
    if texts is None:
        return
    if budget is None:
        raise ValueError(
            "--eta is missing: choose how much a text's tokens are changed (fastdp privatize shows what it does)"
        )
    if tokenizer is None:
        raise ValueError("--tokenizer is missing: name the published model, from a place that you trust")


def _vendor_certificates(folder: Path | None, address: str) -> Path:
    from fastdp.split.channel import check_insecure
    from fastdp.tls import make_certificates

    if folder is None:
        raise ValueError("name a folder with --certificates (fastdp split certificates makes one), or pass --insecure")
    if not folder.exists():
        try:
            check_insecure(address)
        except ValueError:
            raise ValueError(
                f"there is no folder {folder}: fastdp split certificates makes one, for this address and your customers"
            ) from None
        for made in make_certificates(folder, ["customer"]):
            console.print(f"wrote {made}")
    return folder / "vendor" if (folder / "vendor").is_dir() else folder


def _counts(
    customer: SplitCustomer,
    chosen: Contributing,
    labelled: tuple[list[str], list[int]] | None,
    origin: PublicText | None = None,
) -> CTI:
    """Contributing tokens; those of private texts are counted once, and kept in the customer's folder before use."""
    path = customer.folder / COUNTS
    cti = chosen.load_counts(path) if chosen.cti_public is None else None
    if cti is None:
        if labelled is None:
            raise ValueError("--cti without --cti-public counts the texts of --train: name them")
        table: Any = customer.bottom.model.get_input_embeddings()
        cti = chosen.count(customer.tokenizer, table.weight.shape[0], *labelled, customer.served.classes, origin)
        if chosen.cti_public is None:
            cti.save(path)
    show_contributing(cti)
    return cti


def _texts(path: Path, column: str) -> list[str]:
    from fastdp.tables import read_rows

    return read_rows(path).column(column, "--text-column")


def _labelled(path: Path, text_column: str, label_column: str) -> tuple[list[str], list[int]]:
    from fastdp.tables import read_rows

    rows = read_rows(path)
    texts, labels = rows.column(text_column, "--text-column"), rows.column(label_column, "--label-column")
    for index, label in enumerate(labels):
        if not label.isdecimal():
            raise ValueError(f"{rows.place(index)}: the label {label!r} is no class number (0, 1, ...)")
    return texts, [int(label) for label in labels]


def _train(
    customer: SplitCustomer,
    privatizer: TextPrivatizer | PrivateBottom,
    texts: list[str],
    labels: list[int],
    epochs: int,
) -> None:
    with bar("texts", "privatized and sent once") as move:
        customer.send(texts, labels, privatizer, on_example=move)
        move(len(texts), len(texts))
    with bar("steps") as move:
        customer.train(epochs, lambda done, total, loss: move(done, total, f"loss {loss:.3f} (unprotected)"))


def _evaluate(
    customer: SplitCustomer, privatizer: TextPrivatizer | PrivateBottom, texts: list[str], labels: list[int]
) -> None:
    found = customer.predict(texts, privatizer).argmax(1).tolist()
    accuracy = sum(map(int.__eq__, found, labels)) / len(labels)
    console.print(f"accuracy {accuracy:.4f} on {len(labels)} texts")


def _predict(
    customer: SplitCustomer, privatizer: TextPrivatizer | PrivateBottom, texts: list[str], output: Path | None
) -> None:
    found = customer.predict(texts, privatizer).softmax(1)
    lines = [json.dumps({"class": int(row.argmax()), "probability": round(float(row.max()), 4)}) for row in found]
    if output is None:
        for line in lines:
            console.print(line)
    else:
        files.write(output, "".join(f"{line}\n" for line in lines))
        console.print(f"wrote {output}")
