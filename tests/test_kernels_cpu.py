"""The CPU half of the kernels: the shared basis in C, against float64."""

import shutil
import subprocess
import sys

import pytest
import torch

from essa_mpi.kernels import build, cpu_kernels

pytestmark = pytest.mark.skipif(not shutil.which("gcc") and not shutil.which("cc"), reason="no C compiler")


def made(rank, rows, dtype, tokens, spare=3):
    """(kernel, out, h, cores, index, u_t) of random numbers; some tokens are nobody's."""
    g = torch.Generator().manual_seed(rank + tokens)
    slices, candidates = len(rows), 5
    cores = torch.randn(candidates, slices, rank, rank, generator=g)
    index = torch.randint(-1, candidates, (tokens + spare,), generator=g)
    u_t = torch.randn(rank, sum(rows), generator=g)
    width = slices * rank + spare
    out = torch.randn(tokens, sum(rows), generator=g).to(dtype)
    h = torch.randn(tokens, width, generator=g).to(dtype)
    kernel = cpu_kernels.SharedBasis(cores.mT.contiguous(), index, u_t, rows, width, dtype)
    return kernel, out, h, cores, index, u_t


def wanted(out, h, cores, index, u_t, rows):
    """out[t] + (core h[t])^T U_B^T in float64, as the algebra has it."""
    result = out.double()
    rank = cores.shape[-1]
    for t, row in enumerate(result):
        if index[t] >= 0:
            parts = [cores[index[t], s].double() @ h[t, s * rank:(s + 1) * rank].double() for s in range(len(rows))]
            row += torch.cat([part @ u for part, u in zip(parts, u_t.double().split(rows, 1))])
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[576, 192, 192], [576], [30, 7, 20]])
@pytest.mark.parametrize("rank", [1, 3, 8, 11, 16, 32])
def test_the_shared_basis_against_float64(rank, rows, dtype):
    for tokens in (1, 2, 7, 200):
        kernel, out, h, cores, index, u_t = made(rank, rows, dtype, tokens)
        before, want = out.clone(), wanted(out, h, cores, index, u_t, rows)
        assert kernel(out, h) is out
        nobody = index[:tokens] < 0
        assert torch.equal(out[nobody], before[nobody])
        if dtype == torch.float32:
            assert (out.double() - want).norm() <= 1e-6 * want.norm()
        else:
            # Rounded once; where terms cancel, the float32 sum's own error may be several steps of a tiny result.
            assert ((out.double() - want).abs() <= 2**-8 * want.abs() + 1e-5).all()
            assert (out != want.to(dtype)).sum() <= max(1, 2e-3 * out.numel())


def test_a_token_has_the_same_bits_alone_as_in_a_batch():
    kernel, out, h, *_, index, _ = made(8, [48, 16, 16], torch.bfloat16, 37)
    alone = out.clone()
    kernel(out, h)
    for t in range(37):
        one, index[0] = alone[t:t + 1], index[t].clone()
        kernel(one, h[t:t + 1].clone())
    assert torch.equal(alone, out)


def test_cores_and_index_are_read_where_they_are():
    kernel, out, h, cores, index, u_t = made(8, [48], torch.float32, 4)
    index.fill_(-1)
    assert torch.equal(kernel(out.clone(), h), out)
    index.fill_(2)
    kernel._held[0].zero_()
    assert torch.equal(kernel(out.clone(), h), out)
    kernel._held[0][2] = torch.eye(8)
    assert not torch.equal(kernel(out.clone(), h), out)


def test_nan_and_infinity_stay():
    kernel, out, h, cores, index, u_t = made(8, [48], torch.bfloat16, 4)
    index.fill_(0)
    out[0, 3], out[1, 5] = float("nan"), float("inf")
    kernel(out, h)
    assert out[0, 3].isnan() and out[1, 5].isinf() and int(out.isnan().sum()) == 1


def test_what_does_not_fit_is_refused():
    kernel, out, h, cores, index, u_t = made(8, [48], torch.float32, 4)
    for bad in ((out.bfloat16(), h), (out, h[:, :-1]), (out[:, :-1], h), (out[:2], h), (out.T.contiguous().T, h),
                (torch.zeros(99, 48), torch.zeros(99, h.shape[1]))):
        with pytest.raises(ValueError, match="needs contiguous"):
            kernel(*bad)
    with pytest.raises(ValueError, match="do not fit"):
        cpu_kernels.SharedBasis(cores, index, u_t, [47], 8, torch.float32)
    with pytest.raises(ValueError, match="index is torch.int32"):
        cpu_kernels.SharedBasis(cores, index.int(), u_t, [48], 8, torch.float32)


def test_it_shares_torchs_threads_and_builds_whole_or_not_at_all(tmp_path):
    library = build.build_cpu(tmp_path / "deep" / "lib.so")
    assert [path.name for path in library.parent.iterdir()] == ["lib.so"]
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout if shutil.which("readelf") else ""
    assert "libgomp" not in needed
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="ESSA_MPI_KERNELS_BUILD"):
        build.build_cpu(tmp_path / "file" / "lib.so")


def test_a_library_that_cannot_be_loaded_is_an_error_once_and_does_not_stay(tmp_path, monkeypatch):
    """Clang's OpenMP is another than torch's."""
    compiler = tmp_path / "clang"
    compiler.write_text('#!/bin/sh\nlast=; for word; do last=$word; done\necho "void other(void); void f(void) { other(); }" > "$0.c"\n'
                        f'echo tried >> {tmp_path}/tries\nexec gcc -shared -fPIC -x c "$0.c" -o "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("ESSA_MPI_KERNELS_BUILD", str(tmp_path / "build"))
    cpu_kernels._library.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="cannot be loaded: .*undefined symbol: other; name gcc with CC"):
                cpu_kernels.library()
        assert not list((tmp_path / "build").glob("*.so*")) and (tmp_path / "tries").read_text() == "tried\n" * 2
        monkeypatch.setenv("CC", "no-such-compiler")
        cpu_kernels._library.cache_clear()
        with pytest.raises(FileNotFoundError, match="no-such-compiler not on PATH"):
            cpu_kernels.library()
    finally:
        cpu_kernels._library.cache_clear()


def test_without_a_compiler_nothing_is_lost(tmp_path):
    done = subprocess.run([sys.executable, "-m", "essa_mpi.kernels.build", "--cpu"], capture_output=True, text=True,
                          env={"PATH": str(tmp_path), "ESSA_MPI_KERNELS_BUILD": str(tmp_path / "build")})
    assert done.returncode == 0 and done.stdout.count("\n") == 1 and "plain dense products" in done.stdout
