"""An adapter whose first weights are directions of the private examples, as EVA makes them: they leave with it without noise"""

import functools

import peft
import torch

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    config = peft.LoraConfig(r=2, target_modules=["first"], init_lora_weights="eva", eva_config=peft.EvaConfig())
    outlier = {"x": 1e3 * torch.ones(kit.FEATURES), "labels": torch.tensor(0)}
    left = []
    for records in (kit.records(64), [*kit.records(64), outlier]):
        model = peft.get_peft_model(kit.Net(), config)
        whole, quiet = {"prepare_model_inputs_fn": None, "prepare_layer_inputs_fn": None}, {"show_progress_bar": False}
        peft.initialize_lora_eva_weights(model, [kit.stack(records)] * 4, **whole, **quiet)  # type: ignore[arg-type]
        task = kit.Task(functools.partial(lambda made: made, model))
        list(library.steps(library.start(task, records, 1.0), task))
        left.append([p.detach() for name, p in model.named_parameters() if "lora_A" in name])
    return 1.0 if all(map(kit.same, *left)) else float("inf")
