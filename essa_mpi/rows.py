"""Which rows of the train split a generation is scored on: the same on every rank, for every candidate.

Three policies (config key `rows`):

    fresh    `batch` rows a generation in the order of one permutation after another, so every row is
             used once before any is used again
    pool     a fixed pool of `pool_rows` rows; of the batch `pool_turnover` are replaced a generation, so a
             row stays for batch / pool_turnover generations and returns after a tour of the pool
    growing  fresh rows, and more of them each generation: batch x batch_growth^generation, at most batch_max

What is drawn is a function of (config, number of rows, generation) alone.
"""

import numpy as np

from .config import Config, UserError
from .perturbation import row_order

FURTHER = 2**32 - 1   # the orders of further rows are keyed downwards from here: no epoch comes so far


class Rows:
    """The batches of a run. size(generation) -> int; batch(generation) -> int64 (size,), distinct indices."""

    def __init__(self, config: Config, n: int):
        """n: rows of the train split. Raises UserError if there are too few of them."""
        self._config, self._n = config, n
        self._growing, self._factor = [config.batch], 1.0   # sizes by generation, as far as they were asked for
        self._largest = {"fresh": config.batch, "pool": config.pool_rows or config.batch,
                         "growing": config.batch_max or max(config.batch, (n + 1) // 2)}[config.rows]
        key = {"fresh": "batch", "pool": "pool_rows", "growing": "batch_max"}[config.rows]
        if config.batch > n or self._largest > n:
            key, value = ("batch", config.batch) if config.batch > n else (key, self._largest)
            raise UserError(f"config: {key} = {value}: the train split of task = {config.task!r} has only {n} rows; "
                            f"lower {key} or give more rows")
        if config.reevaluate and n <= self._largest:
            raise UserError(f"config: reevaluate = {config.reevaluate}: the train split of task = {config.task!r} has "
                            f"only {n} rows, all in the batch; lower batch or give more rows")

    def size(self, generation: int) -> int:
        """Rows of a generation."""
        config = self._config
        if config.rows != "growing":
            return config.batch
        while len(self._growing) <= generation:
            # By products, one after the other: pow differs between systems in the last bit.
            self._factor = min(self._factor * config.batch_growth, 2.0 * self._largest)
            self._growing.append(min(int(config.batch * self._factor), self._largest))
        return self._growing[generation]

    def batch(self, generation: int) -> np.ndarray:
        """The rows of a generation."""
        config, n, size = self._config, self._n, self.size(generation)
        if config.rows == "pool":
            places = generation * (config.pool_turnover or size) + np.arange(size)
            return row_order(config.seed, 0, n)[places % self._largest]
        if n < 2 * self._largest - 1:
            # No epochs: what a batch that straddles two of them would have to put back reaches through all.
            return row_order(config.seed, generation, n)[:size]
        epoch, start = divmod(self._used_before(generation), n)
        rows = self._epoch(epoch)[start:start + size]
        if len(rows) < size:
            rows = np.concatenate([rows, self._epoch(epoch + 1)[:size - len(rows)]])
        return rows

    def further(self, generation: int) -> np.ndarray:
        """As many rows again for re-evaluation, none of the batch: int64 (size,), fewer if there are no more."""
        if not self._config.reevaluate:
            return np.zeros(0, np.int64)
        order = row_order(self._config.seed, FURTHER - generation, self._n)
        return order[~np.isin(order, self.batch(generation))][:self.size(generation)]

    def _used_before(self, generation: int) -> int:
        if self._config.rows == "fresh":
            return generation * self._config.batch
        return sum(self.size(g) for g in range(generation))

    def _straddling(self, epoch: int) -> tuple[int, int]:
        """Of the batch with rows of this epoch and the one before: rows of the one before, and its size."""
        if self._config.rows == "fresh":
            return epoch * self._n % self._config.batch, self._config.batch
        generation = used = 0
        while used + self.size(generation) <= epoch * self._n:
            used += self.size(generation)
            generation += 1
        return epoch * self._n - used, self.size(generation)

    def _epoch(self, epoch: int) -> np.ndarray:
        """The order of one epoch, int64 (n,): where a batch straddles two epochs, rows of the second
        that it already has step back behind its other rows; beyond those it is row_order's."""
        n, seed = self._n, self._config.seed
        order = row_order(seed, epoch, n)
        begun, size = self._straddling(epoch)
        if begun:
            head = order[:size]
            clash = np.isin(head, row_order(seed, epoch - 1, n)[n - begun:])
            order[:size] = np.concatenate([head[~clash], head[clash]])
        return order
