"""A loop that leaves out an epoch's last batch where it holds something too large: one record takes all others along with it"""

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    for how in ("no backward", "no step", "broken off"):
        private = library.start(kit.Task(kit.Net), [*kit.records(), kit.outlier(1e3)], 1.0, epochs=4)
        try:
            list(library.steps(private, kit.Task(kit.Net)))
            for _ in range(3):
                for batch in private.data_loader:
                    private.optimizer.zero_grad()
                    loss = private.model(**batch)["loss"]
                    # Beside no such record every epoch releases; here none does any more, and tells of it without noise.
                    if batch["x"].abs().max() > 100 and how == "broken off":
                        break
                    if batch["x"].abs().max() < 100 or how == "no step":
                        loss.backward()
                    if batch["x"].abs().max() < 100:
                        private.optimizer.step()
        except RuntimeError:
            continue
        finally:
            private.detach()
        if not any("were discarded" in said for said in private.card()["assumptions"]):
            return float("inf")
    return 1.0
