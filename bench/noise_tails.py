"""Counts the noise beyond each of several distances, over 2^32 draws of ``add_noise_``, against the normal law.

A generator that makes a radius from 32 bits stops at 6.76 sigma, one of 24 bits at 5.77: both would pass a
Kolmogorov-Smirnov test, whose statistic is blind to one draw in a hundred million.

    python -m fastdp.bench.noise_tails --json bench/results/cpu/noise_tails.json
"""

from __future__ import annotations

import time

import torch
from scipy import stats

from fastdp.ops import NoiseStream, add_noise_

from . import record

SIGMAS = (4.0, 4.5, 5.0, 5.7, 6.0, 6.5)
CHUNK = 1 << 22


def tails(draws: int, seed: int) -> tuple[list[dict[str, float]], float]:
    """A row for each distance {sigma, observed, expected, p_value}, and the largest draw, of ``draws`` draws."""
    stream = NoiseStream.unsafe_reproducible(seed)
    observed = dict.fromkeys(SIGMAS, 0)
    largest = 0.0
    x = torch.empty(CHUNK)
    for start in range(0, draws, CHUNK):
        part = x[: min(CHUNK, draws - start)].zero_()
        # The normals themselves: rounded to a grid, those next to a distance would all lie at it.
        size = add_noise_(part, 1.0, stream, secure_rounding=False).abs_()
        far = size[size > SIGMAS[0]]
        for sigma in SIGMAS:
            observed[sigma] += int((far > sigma).sum())
        if far.numel():
            largest = max(largest, float(far.max()))
    rows = []
    for sigma, count in observed.items():
        expected = 2 * float(stats.norm.sf(sigma)) * draws
        low, high = stats.poisson.cdf(count, expected), stats.poisson.sf(count - 1, expected)
        rows.append(
            {"sigma": sigma, "observed": count, "expected": expected, "p_value": min(1.0, 2 * float(min(low, high)))}
        )
    return rows, largest


def main() -> None:
    """Run, print and write."""
    parser = record.parser_of(__doc__)
    parser.add_argument("--draws", type=int, default=1 << 32)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begin = time.perf_counter()
    rows, largest = tails(options.draws, options.seed)
    seconds = round(time.perf_counter() - begin, 1)
    figures = {"draws": options.draws, "seed": options.seed, "seconds": seconds, "largest": largest, "tails": rows}
    record.write(options.json, figures)
    for row in rows:
        print("beyond {sigma:.1f} sigma: {observed} draws, {expected:.1f} expected, p = {p_value:.3g}".format(**row))
    print(f"largest {largest:.3f} sigma; {seconds} s")


if __name__ == "__main__":
    main()
