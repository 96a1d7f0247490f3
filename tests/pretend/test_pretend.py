"""The device refuses what CUDA does, and ordinary programs train on it; each in a process of its own."""

import json
import subprocess
import sys

import pytest

RULES = """
import copy, torch
from tests.pretend import pretend_device

def refuse(word, *calls):
    for number, call in enumerate(calls):
        try:
            call()
        except RuntimeError as error:
            assert word in str(error), error
        else:
            raise AssertionError((word, number))

device, host = pretend_device(), torch.arange(12.0).view(3, 4)
there, ids = host.to(device), torch.tensor([2, 0])
assert type(there) is torch.Tensor and there.device == device and there.data_ptr() != host.data_ptr()
refuse("same device", lambda: there + host, lambda: host.mul_(there), lambda: torch.equal(there, host), lambda: there @ host.T,
       lambda: torch.cat([there, host]), lambda: torch.stack([there.sum(), host.sum()]), lambda: there.index_select(0, ids),
       lambda: torch.where(host > 1, there, there), lambda: host.sum().add_(there.sum()), lambda: there.masked_fill(host > 1, 0))
refuse("indices", lambda: host[ids.to(device)])
refuse("generator", lambda: torch.rand(2, device=device, generator=torch.Generator()))
for found, expected in ((there * torch.tensor(2.0), host * 2), (there[ids], host[ids]), (there[host > 5], host[host > 5])):
    assert found.device == device and torch.equal(found.cpu(), expected)

view, seen = there[1:].T, there._version
view.mul_(2)
assert there._version == seen + 1 and there[2, 3] == 22 and view._base is there
there.resize_(4, 4)[3] = 7
assert there[1].tolist() == [8, 10, 12, 14] and there[3].tolist() == [7] * 4

torch.manual_seed(0)
first, drawn, kept = torch.rand(3), torch.rand(3, device=device), torch.get_rng_state()
torch.nn.functional.dropout(there)
assert torch.equal(first, drawn.cpu()) and torch.equal(torch.get_rng_state(), kept)

net = torch.nn.Sequential(torch.nn.Conv1d(2, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8, 2))
twin, x, weight = copy.deepcopy(net), torch.randn(5, 2, 4), net[0].weight
assert net.to(device)[0].weight is weight and weight.device == device
for model, rows in ((net, x.to(device)), (twin, x)):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
torch.testing.assert_close([p.cpu() for p in net.parameters()], list(twin.parameters()))
for cell in (torch.nn.LSTM(4, 3), torch.nn.GRU(4, 3)):
    expected = cell(x)[0]
    torch.testing.assert_close(cell.to(device)(x.to(device))[0].cpu(), expected)
"""

#: Programs whose axes may be as long as a batch, that draw, or that hand the model's inputs, its outputs or numbers to the host.
SAMPLE = """
inputs_time_first pixels_time_first recognition_outside attention_kept_for_plots bags_of_flat_ids_outside graphs_of_one_size
double_precision checkpointed_pieces causal_phi3 labels_in_loop_t5 labels_in_loop_no_mask_llama lora focal_inside
counts_for_the_log ctc_varying_lengths pairs_concatenated flip_torch_outside noise_in_loop_outside
forward_draws_multinomial variational_inside layer_drop_python sorted_rows_by_value guard_exit_outside expert_capacity
sparse_autoencoder images_in_lists_one_at_a_time
""".split()


def run(*arguments):
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def trained(folder, *names):
    """The routes of programs on the device; all must end as on the processor."""
    run("-m", "tests.honest.run", "--device", "pretend", "--json", str(folder / "rows.json"), *names)
    rows = json.loads((folder / "rows.json").read_text())["figures"]
    assert not [f"{row['name']}: {row['route']} {row['message']}" for row in rows if row["held"] < row["seeds"]]
    return [row["route"] for row in rows]


def test_the_device_mixes_with_nothing():
    run("-c", RULES)


@pytest.mark.timeout(300)
def test_programs_train_there_as_on_the_processor(tmp_path):
    routes = trained(tmp_path, *SAMPLE)
    assert len(routes) == len(SAMPLE)
    assert "left out" not in routes


@pytest.mark.slow
def test_every_program_that_makes_no_tensors_on_the_processor_trains_there(tmp_path):
    assert sum(route != "left out" for route in trained(tmp_path)) > 240
