"""The latency models beside Fig. 3 of ESSA (arXiv 2507.04453): minutes to 0.835 on 16 and on 128 GPUs.

How many generations or steps that took is not stated, so each model is set to the paper's minutes at 16 GPUs; the
minutes at 128 are its prediction. A model with the same work at both can be 8 times as fast at most.
"""

from dataclasses import replace

from essa_mpi.latency import allreduce_paper, essa_seconds
from essa_mpi.plan import aligned

from .generation import Setting, Way, qwen, sample_seconds, simulate

FEW, MANY = 16, 128
PAPER = {"ESSA": {FEW: 200.0, MANY: 20.0}, "GRPO": {FEW: 400.0, MANY: 150.0}}     # in words: "about", and "under" 20
ROLLOUTS, GROUP = 512, 8        # the paper's global batch; how many of them are of one prompt is not stated


def grpo_seconds(setting: Setting, gpus: int, splits, generations: int, seed: int) -> tuple[float, int]:
    """(seconds, GPUs an engine) of a step: (b) for the rollouts, 6 operations a parameter and token for training.

    6: forward, activations computed again, their gradient; the base's weights have none. Rollouts and training take
    turns on all GPUs, which is as fast as the best theta; the all-reduce is the adapter's.
    """
    rollouts = replace(setting, population=GROUP, batch=ROLLOUTS // GROUP, update=0.0, place=0.0)
    model, gpu = qwen(setting.size), setting.gpu
    tokens = ROLLOUTS * (setting.prompt + setting.mean_length)
    training = 6 * model.parameters * tokens / (gpus * gpu.operations * gpu.reached)
    reducing = allreduce_paper(gpus, 4 * model.adapter_parameters(setting.rank), setting.network.bandwidth)
    return min((simulate(rollouts, Way(gpus, "engine", True, t), generations, seed)["seconds"] + training + reducing, t)
               for t in splits)


def against_paper(setting: Setting, rows: list[dict], splits, generations: int, seed: int) -> dict:
    """Each model's minutes at 128 GPUs, over the paper's. rows: those of `scaling`, strong and best splits."""
    def seconds(scaling, cost):
        return {row["gpus"]: row["seconds"] for row in rows
                if (row["scaling"], row["cost"], row["tiles"]) == (scaling, cost, True)}

    eta, bandwidth = sample_seconds(setting), setting.network.bandwidth
    constant, engine = seconds("strong", "constant"), seconds("strong", "engine")
    models = {
        ("ESSA", "appendix B alone"): {g: essa_seconds(setting.population, setting.batch, g, 1, eta, bandwidth)
                                       for g in (FEW, MANY)},
        ("ESSA", "(a) constant"): constant,
        ("ESSA", "(b) engine"): engine,
        ("ESSA", "(b) best split"): seconds("best split", "engine"),
        ("GRPO", "appendix B, all-reduce of no size"): {FEW: 1 / FEW, MANY: 1 / MANY},
        ("GRPO", "(b) engine"): {g: grpo_seconds(setting, g, (1,), generations, seed)[0] for g in (FEW, MANY)},
        ("GRPO", "(b) best split"): {g: grpo_seconds(setting, g, splits, generations, seed)[0] for g in (FEW, MANY)},
    }
    fits = []
    for (method, name), found in models.items():
        paper = PAPER[method]
        minutes = paper[FEW] * found[MANY] / found[FEW]
        fits.append({"method": method, "model": name, "minutes_few": paper[FEW], "minutes_many": minutes,
                     "paper_many": paper[MANY], "over_paper": minutes / paper[MANY]})
    at = {(row["method"], row["model"]): row["minutes_many"] for row in fits}
    ratio = {name: at["GRPO", name] / at["ESSA", name] for name in ("(b) engine", "(b) best split")}
    essa, grpo = PAPER["ESSA"], PAPER["GRPO"]
    return {"fits": fits, "ratio_engine": ratio["(b) engine"], "ratio_best": ratio["(b) best split"],
            "explained": all_reduces(setting),
            "speedup_essa": essa[FEW] / essa[MANY], "speedup_grpo": grpo[FEW] / grpo[MANY],
            "generations": {"constant": essa[FEW] * 60 / constant[FEW], "engine": essa[FEW] * 60 / engine[FEW]}}


def all_reduces(setting: Setting) -> list[dict]:
    """How many all-reduces n would explain GRPO's two numbers: work / G + n 2 M (G - 1) / (G bw), both unknown."""
    model, paper, found = qwen(setting.size), PAPER["GRPO"], []
    for kind, nbytes in (("adapter", 4 * model.adapter_parameters(setting.rank)), ("full", 2 * model.parameters)):
        one = {g: allreduce_paper(g, nbytes, setting.network.bandwidth) for g in (FEW, MANY)}
        number = 60 * (MANY * paper[MANY] - FEW * paper[FEW]) / (MANY * one[MANY] - FEW * one[FEW])
        found.append({"all_reduce_of": kind, "bytes": nbytes, "seconds": one[MANY], "number": number,
                      "minutes": number * one[MANY] / 60})
    return found


def told(found: dict) -> None:
    rows = [["", f"on {FEW}", f"on {MANY}", "paper", "model / paper"]]
    rows += [[f"{row['method']}, {row['model']}".ljust(40), f"{row['minutes_few']:.0f}", f"{row['minutes_many']:.1f}",
              f"{row['paper_many']:.0f}", f"{row['over_paper']:.2f}"] for row in found["fits"]]
    print(f"\nFig. 3, minutes to 0.835, models set to the paper at {FEW} GPUs", *aligned(rows), sep="\n")
    ratio = PAPER["GRPO"][MANY] / PAPER["ESSA"][MANY]
    print(f"  GRPO's minutes over ESSA's on {MANY}: the paper {ratio:.1f} (6 in its text), (b) engine "
          f"{found['ratio_engine']:.1f}, (b) best split {found['ratio_best']:.1f}")
    print(f"  the paper's ESSA is {found['speedup_essa']:.0f} times as fast or more on {MANY // FEW} times the GPUs: "
          f"more than linear, so no model of the same work gives it")
    for row in found["explained"]:
        print(f"  appendix B would explain GRPO's {found['speedup_grpo']:.1f} by {row['number']:,.0f} all-reduces, "
              f"{row['all_reduce_of']}, of {row['seconds']:.3g} s")
