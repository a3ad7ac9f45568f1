"""Mode `shared`: K candidates decode in one batch, on dense products they share. Runs inside the vLLM worker.

All candidates share V_A and U_B of a projection and differ in an r x r core, so for the tokens X of
a whole batch (rows) and each token's candidate k(t):

    H = X V_A                    one dense product
    G[t] = H[t] core[k(t)]^T     r x r a token and slice
    Y += G U_B^T                 one dense product, added in place to the projection's output

vLLM's own LoRA layers stay in place, with rank 1 and nothing in them, for what they know: which
token belongs to which request's adapter. Only their `apply` is replaced.
"""

import types

import numpy as np
import torch

from .spectrum import Spectrum

# Up to this size every layer's core is gathered for each token once a step; beyond (prefill) a layer at a time.
GATHER_BYTES = 4 * 2**20


class SharedBasis:
    """The cores of all candidates, and the patched layers that apply them.

    cores: float32 (candidates + 1, width): each candidate's cores of all layers, flat; the last
    row is zero, for tokens of no candidate. Written in place, never replaced.
    """

    def __init__(self, layers: dict[str, list], spectrum: Spectrum, candidates: int, manager, device):
        """layers: fused layer name -> [(slice, index of the projection)], of what is adapted."""
        self._candidates, self._width, self._columns = candidates, 0, {}
        self._wrapper = None
        self.tokens = None         # this step's cores, (T, width), or None: gather a layer at a time
        for name, parts in layers.items():
            layer = manager.modules[name]
            self._patch(layer, [(part, spectrum.projections[i], i) for part, i in sorted(parts)], device)
            self._wrapper = layer.punica_wrapper
        self.cores = torch.zeros(candidates + 1, self._width, dtype=torch.float32, device=device)
        self.index = None          # (T,) int64: each token's row of `cores`
        self._follow_mapping()

    def write(self, slots: list[int], cores: list[list[np.ndarray]]) -> None:
        """Candidate k's cores[k][i], (r, r) float64 of projection i, into row slots[k]."""
        rows = np.zeros((len(cores), self._width), np.float32)
        for k, candidate in enumerate(cores):
            for i, (at, rank, width) in self._columns.items():
                # Transposed, so that a token's row multiplies it from the left.
                block = np.zeros((rank, rank), np.float32)
                block[:width, :width] = candidate[i].T
                rows[k, at:at + rank * rank] = block.ravel()
        self.cores[torch.tensor(slots, device=self.cores.device)] = torch.from_numpy(rows).to(self.cores.device)
        self._stale = True

    def _follow_mapping(self) -> None:
        """Refresh `index` (and `tokens`) whenever vLLM tells its LoRA layers whose token is whose."""
        update = self._wrapper.update_metadata
        self._stale = True

        def updated(*args, **kwargs):
            update(*args, **kwargs)
            self._stale = True
        self._wrapper.update_metadata = updated

    def _refresh(self) -> None:
        index = self._wrapper.token_lora_indices
        self.index = torch.where(index < 0, self._candidates, index)
        small = self.index.numel() * self._width * 4 <= GATHER_BYTES
        self.tokens = self.cores.index_select(0, self.index) if small else None
        self._stale = False

    def token_cores(self, at: int, size: int, slices: int, rank: int) -> torch.Tensor:
        """(T, slices, rank, rank) float32: each token's cores of one layer."""
        if self._stale:
            self._refresh()
        if self.tokens is not None:
            flat = self.tokens[:, at:at + size]
        else:
            flat = self.cores[:, at:at + size].index_select(0, self.index)
        return flat.view(-1, slices, rank, rank)

    def _patch(self, layer, parts, device) -> None:
        slices, rank = len(parts), max(p.rank for _, p, _ in parts)
        dtype = layer.lora_b_stacked[0].dtype
        n, sizes = parts[0][1].V_A.shape[0], [s.shape[2] for s in layer.lora_b_stacked]
        basis_a = torch.zeros(n, slices * rank)
        basis_b = torch.zeros(slices * rank, sum(sizes))
        first = np.concatenate([[0], np.cumsum(sizes)])
        at = self._width
        for s, (part, p, i) in enumerate(parts):
            basis_a[:, s * rank:s * rank + p.rank] = torch.from_numpy(p.V_A)
            basis_b[s * rank:s * rank + p.rank, first[part]:first[part + 1]] = torch.from_numpy(p.U_B.T.copy())
            self._columns[i] = (at + s * rank * rank, rank, p.rank)
        size = slices * rank * rank
        self._width += size
        basis_a, basis_b = basis_a.to(device, dtype), basis_b.to(device, dtype)
        quant, base = layer._get_quant_method(), layer.base_layer
        shared = self

        def apply(self, x, bias=None):
            output = quant.apply(base, x, bias)
            h = torch.mm(x, basis_a)
            cores = shared.token_cores(at, size, slices, rank)
            g = (h.view(-1, slices, rank, 1) * cores).sum(2)
            return output.addmm_(g.view(-1, slices * rank).to(dtype), basis_b)
        layer.apply = types.MethodType(apply, layer)
