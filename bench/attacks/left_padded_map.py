"""A noised relevance map of left-padded text: one long record shifts the positions, and so the maps, of everyone else"""

import functools

from . import kit, left_padding, systems


def attack(library: systems.FastDP) -> float:
    import fastdp
    from fastdp.methods.rapft import NoisyMap

    sums = []

    class Watched(fastdp.RapFT):
        def conclude(self, findings):
            sums.append(dict(findings.releases[0]))
            return super().conclude(findings)

    method = Watched(NoisyMap(1e-9, 1.0, max_norm=1.0))
    task = kit.Task(left_padding.model, collate=functools.partial(kit.padded, left=True), options={"method": method})
    data = kit.tokens(12, [6, 7, 9])
    for records in (data, [*data, kit.tokens(1, [40], seed=3)[0]]):
        private = library.start(task, records, 1.0, noise_multiplier=1.0, target_delta=1e-3)
        private.prepare()
        private.detach()
    return kit.apart(*sums)
