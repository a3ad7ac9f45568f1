"""Which rank scores what: all cells (arm, row) in order, cut into a contiguous run a rank.

Every rank computes every other's share, from what all of them know. Sums of rewards are exact, so what a candidate's
fitness is does not depend on where the cuts are.
"""

from dataclasses import dataclass
from itertools import accumulate


@dataclass
class Tile:
    """Rows [start, stop) of one arm (a candidate, or the mean): what is scored by one rank."""

    arm: int
    start: int
    stop: int


def bounds(cells: int, size: int, weights: list[int] | None = None) -> list[int]:
    """Where the ranks' runs of cells begin, and the end of the last: size + 1 numbers.

    weights: how much of the whole each rank is to have, positive integers; equal if None. In whole numbers, so that
    every rank computes the same.
    """
    if weights is None:
        return [rank * cells // size for rank in range(size + 1)]
    total = sum(weights)
    return [0] + [part * cells // total for part in accumulate(weights)]


def share(lengths: list[int], rank: int, size: int, weights: list[int] | None = None) -> list[Tile]:
    """The tiles of `rank`. Without weights every rank gets floor or ceil of cells / size.

    Neither the population nor the batch need divide by the ranks, and ranks beyond the population still help.
    """
    at = bounds(sum(lengths), size, weights)
    tiles, offset = [], 0
    for arm, length in enumerate(lengths):
        start, stop = max(at[rank] - offset, 0), min(at[rank + 1] - offset, length)
        if start < stop:
            tiles.append(Tile(arm, start, stop))
        offset += length
    return tiles


def all_shares(lengths: list[int], size: int, weights: list[int] | None = None) -> list[list[Tile]]:
    """`share` of every rank, in one sweep over ranks and arms: of 100,000 ranks that counts."""
    cuts, shares = bounds(sum(lengths), size, weights), []
    arm = offset = 0        # of the arm that the next cell is in, and its first cell
    for at, last in zip(cuts, cuts[1:]):
        tiles = []
        while at < last:
            while offset + lengths[arm] <= at:
                offset += lengths[arm]
                arm += 1
            stop = min(last, offset + lengths[arm])
            tiles.append(Tile(arm, at - offset, stop - offset))
            at = stop
        shares.append(tiles)
    return shares


class Balance:
    """Weights by the speed of each rank in the generation before, from the times in the all-gather's header.

    Equal on every rank, since the times are. A share moves half of the way, and never beyond a quarter or four times
    the mean: one slow generation is not a slow rank.
    """

    SCALE = 1 << 20     # the mean weight

    def __init__(self, size: int):
        self.weights, self._next = [self.SCALE] * size, None

    def note(self, cells: list[int], nanoseconds: list[int]) -> None:
        """What each rank scored and how long it took; taken into account from the next share on."""
        size = len(self.weights)
        if min(cells) == 0 or min(nanoseconds) <= 0:    # somebody's speed is not known
            return
        speeds = [(count << 40) // time for count, time in zip(cells, nanoseconds)]
        total = max(1, sum(speeds))
        fair = [min(4 * self.SCALE, max(self.SCALE // 4, speed * size * self.SCALE // total)) for speed in speeds]
        self._next = [(old + new) // 2 for old, new in zip(self.weights, fair)]

    def settle(self) -> None:
        """Take over what was noted. Not at once: an exchange and what belongs to it have one set of weights."""
        if self._next is not None:
            self.weights, self._next = self._next, None
