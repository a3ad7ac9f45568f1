"""`python -m essa_mpi grpo`: from a config to a run folder with a trained adapter in it."""

import time
from dataclasses import replace

import numpy as np

from .. import trace
from ..config import Config, UserError
from ..departure import LEAVE, LEFT, Departure
from ..evaluate import evaluate
from ..files import write_folder, write_json
from ..record import Record, duration
from ..report import closing
from ..run import goes_on, leave, open_folder, prepare, provenance_of, start_scorer
from ..runfile import RunFolder
from ..shares import Balance
from ..watchdog import Watchdog
from ..world import World
from .grpo import Training, learn, objective_of
from .learner import Learner
from .policy import Policy


def run(world: World, config: Config, resume: bool, scorer_factory=None, trace_file: str | None = None) -> None:
    """Train as `config` says; every rank calls this. Ends with SystemExit or MPI_Abort on failure.

    scorer_factory(config, spectrum, task) -> scorer replaces the engine and reward (tests). trace_file: see `trace`.
    """
    error = None
    try:
        config = settled(config)
    except UserError as e:
        error = e
    world.agree(error)
    prepared = prepare(world, config, trace_file)
    folder, checkpoint, held = open_folder(world, config, prepared, resume, command="grpo")
    world.failure_file = str(folder.path / "failed.txt")
    world.install_hooks()
    world.balance = Balance(world.size) if config.balance else None
    scorer = start_scorer(world, replace(config, samples=config.group), prepared, folder, scorer_factory)
    policy = _policy(world, config, prepared)
    learner, cursor, start = Learner(policy.parameters.start, config), 0, 0
    if checkpoint:
        state = checkpoint["policy"]
        learner.load_state(state)
        cursor, start = int(state["cursor"]), int(state["steps"])
        world.say(f"resuming {folder.path} at step {start} of {config.generations}")
    recorder = Recorder(world, config, prepared, folder, learner, checkpoint) if world.rank == 0 else None
    world.say(f"{config.name}: {title(config)} on {len(learner.flat)} {KINDS[config.parameters]}, {config.batch} prompts x "
              f"{config.group} rollouts, {world.size} rank{'s' * (world.size > 1)}")
    if world.size > config.batch:
        world.say(f"warning: {world.size} ranks but batch = {config.batch} prompts a step: a rank draws whole groups, so some "
                  f"draw none; raise batch")
    if recorder:
        recorder.start_trackers()

    greedy = replace(config, temperature=0.0)
    validating = scorer.like(greedy, prepared.reward)

    def validate(placed, digest):
        found = evaluate(greedy, world, validating, {"policy": placed}, prepared.task.validation, digest)
        return found.scores["policy"]["accuracy"]

    if config.hang_seconds and world.size > 1:
        world.watchdog = Watchdog(world, config.hang_seconds)
    if trace_file:
        trace.start(world)
    departure = Departure(config.max_seconds, config.walltime_seconds, recorder.elapsed() if recorder else 0.0)
    if learn(config, world, prepared.task, scorer, policy, learner, start, cursor,
             recorder.record if recorder else lambda step: None, validate if prepared.task.validation else None,
             departure) & LEAVE:
        trace.write(world, trace_file)
        leave(world, folder, prepared)
    world.leave_on_signal(goes_on(folder), LEFT)
    _finish(world, greedy, prepared, folder, validating, policy, learner, recorder)
    trace.write(world, trace_file)
    prepared.reward.close()
    if held:
        held.close()


KINDS = {"lora": "LoRA parameters", "spectrum": "singular values"}
NAMES = {"grpo": "GRPO", "dapo": "DAPO", "cispo": "CISPO", "dr_grpo": "Dr. GRPO"}


def title(config: Config) -> str:
    """The method's name: GRPO, F-DAPO, SVD-GRPO, ..."""
    name = NAMES[config.loss]
    if config.focal_gamma:
        name = f"F-{name} (gamma {config.focal_gamma:g})"
    return f"SVD-{name}" if config.parameters == "spectrum" else name


def settled(config: Config) -> Config:
    """The config with what `grpo` decides. Raises UserError for what it cannot do."""
    if not config.temperature:
        raise UserError("config: temperature = 0.0: the rollouts of a prompt would all be the same; set temperature = 1.0")
    if config.temperature < 0.01:
        raise UserError(f"config: temperature = {config.temperature}: vLLM draws at no less than 0.01; set temperature = 1.0")
    if config.rows == "growing":
        raise UserError("config: rows = 'growing': `grpo` learns from `batch` prompts a step; set rows = 'fresh' or 'pool'")
    if config.top_p != 1:
        raise UserError(f"config: top_p = {config.top_p}: the trainer's probabilities are those of all tokens; set top_p = 1.0")
    if config.samples != 1:
        raise UserError(f"config: samples = {config.samples}: `grpo` draws `group` completions a prompt; set samples = 1")
    if config.mode == "auto":
        config = replace(config, mode="shared")
    check_mode(config)
    if config.mini_batch > config.batch:
        raise UserError(f"config: mini_batch = {config.mini_batch}: must be at most batch = {config.batch}")
    objective = objective_of(config)
    if objective.clip_low > 1:
        raise UserError(f"config: clip_low = {config.clip_low:g}: must be at most 1: no ratio is below 0")
    engine = config.vllm
    if config.temperature != 1:     # log-probabilities of what was drawn from, not of the model at temperature 1
        engine = {"logprobs_mode": "processed_logprobs", **engine}
    return replace(config, racing=0, reevaluate=0, answer="final", vllm=engine)


def check_mode(config: Config) -> None:
    """Raise UserError for a mode in which the engine cannot hold what is trained."""
    if config.parameters == "lora" and config.mode != "shared":
        raise UserError(f"config: mode = {config.mode!r}: parameters = 'lora' changes what candidates share; use mode = 'shared'")


def _policy(world: World, config: Config, prepared) -> Policy:
    policy = error = None
    began = time.perf_counter()
    try:
        policy = Policy(config, prepared.spectrum)
    except Exception as e:
        error = e
    world.agree(error)
    world.say(f"trainers ready in {time.perf_counter() - began:.0f} s")
    return policy


def schema(config: Config) -> dict:
    """Of history.h5; see `runfile.history_schema` for what fields of the same names are."""
    integer, real = ((), np.int64), ((), np.float64)
    return {
        "generation": integer,
        "fitness": ((config.batch,), np.float64),   # mean reward of each group that counted, nan beyond them
        "mean_fitness": real,                       # of all that was drawn
        "best_fitness": real,
        "digest": integer, "missing": integer, "tokens": integer, "cut": integer, "empty": integer, "too_long": integer,
        "validation": real, "validation_n": integer,
        "flat_groups": integer,     # of those drawn, with nothing to learn: all rewards the same
        "groups": integer,          # drawn
        "loss": real, "gradient_norm": real, "rate": real, "clipped": real, "kl": real,
        "mismatch": real, "mismatch_kl": real, "mismatch_most": real,
        "bytes_gathered": integer, "bytes_reduced": integer,
        **{f"times/{name}": real for name in ("unix", "seconds", "generate", "place", "score", "wait", "allgather", "train",
                                              "allreduce", "update", "checkpoint")},
    }


class Recorder(Record):
    """Rank 0's files, and the progress line, of a training."""

    def __init__(self, world, config, prepared, folder, learner, checkpoint):
        super().__init__(world, config, folder, schema(config), checkpoint,
                         {**provenance_of(world, config, prepared), "method": title(config)})
        self._learner, self._parts = learner, prepared.reward.names

    def record(self, t: Training) -> None:
        """Write one step down. Raises UserError if the disk refuses."""
        config, step, found, now = self._config, t.step, t.step.exchanged, time.time()
        counts = {name: found.total(name) for name in ("completions", "tokens", "cut", "empty", "too_long")}
        mean = {name: float(found.header[f"{name}_ns"].mean()) / 1e9 for name in ("place", "generate", "score")}
        known = step.drawn[np.isfinite(step.drawn)]
        groups = np.full(config.batch, np.nan)
        groups[:len(step.rewards)] = [row[np.isfinite(row)].mean() if np.isfinite(row).any() else np.nan
                                      for row in step.rewards]
        tokens = max(1.0, t.sums["tokens"])
        about = {"flat_groups": step.flat_groups, "groups": len(step.drawn), "loss": self._loss(t),
                 "gradient_norm": float(np.mean(t.norms)) if t.norms else float("nan"), "rate": t.rate,
                 "clipped": t.sums["clipped"] / tokens, "kl": t.sums["kl"] / tokens,
                 "mismatch": t.sums["mismatch"] / tokens, "mismatch_kl": t.sums["mismatch_kl"] / tokens,
                 "mismatch_most": t.sums["mismatch_most"], "bytes_gathered": found.bytes_sent + step.drawn.nbytes // self._world.size,
                 "bytes_reduced": t.bytes_reduced}
        reward = {"mean_fitness": float(known.mean()) if len(known) else float("nan"),
                  "best_fitness": float(np.nanmax(groups)) if np.isfinite(groups).any() else float("nan")}
        shared = {"missing": int(step.drawn.size - len(known)), "validation": t.validation}
        # The last to come waits for nobody: the least of the ranks' times in the all-reduce is the all-reduce.
        train, allreduce = float(t.shares[:, 0].mean()), float(t.shares[:, 1].min())
        self.history.append(
            t.number, fitness=groups, digest=t.digest, validation_n=t.validation_rows, **shared, **reward, **about,
            **{name: counts[name] for name in ("tokens", "cut", "empty", "too_long")},
            **{"times/unix": now, "times/seconds": t.seconds["total"], "times/generate": mean["generate"],
               "times/place": mean["place"], "times/score": mean["score"],
               "times/wait": found.wait_mean + float(t.shares[:, 1].mean()) - allreduce,
               "times/allgather": t.seconds["allgather"], "times/train": train, "times/allreduce": allreduce,
               "times/update": t.seconds["update"], "times/checkpoint": self.last_checkpoint})
        line = {"generation": t.number, **reward, "reward_std": float(known.std()) if len(known) else None, **shared,
                "validation_rows": t.validation_rows, **counts, **about, "draws": step.draws, "updates": len(t.norms),
                "focal_weight": float(step.weights.mean()) if len(step.weights) else None,
                **({"components": {name: part.given_mean() for name, part in zip(self._parts, found.components)}}
                   if self._parts else {}),
                "allgathers": 2 * step.draws + 1, "ranks": self._world.size,
                "seconds": {**t.seconds, "wait_mean": found.wait_mean, "train_mean": train, "allreduce": allreduce}}
        self.log(t.number, line, step.samples, now)
        if self.is_due(t.number, step.stop):
            self.timed(lambda: self.save(t.number + 1, {"policy": {
                **self._learner.state(), "cursor": np.int64(t.cursor), "steps": np.int64(t.number + 1)}}))
        self._progress(t, counts, reward["mean_fitness"], mean["generate"], train)

    def _loss(self, t: Training) -> float:
        """The sum of the losses a token that has a gradient: its scale is not the objective's, its sign and trend are."""
        return t.sums["loss"] / max(1.0, t.sums["tokens"])

    def _progress(self, t: Training, counts: dict, mean: float, generating: float, training: float) -> None:
        step, left = t.step, self.seconds_left(t.number, t.seconds["total"])
        parts = [f"step {t.number + 1}/{self._config.generations}", f"reward {mean:.3f}",
                 f"{len(step.drawn) - step.flat_groups} of {len(step.drawn)} groups differ"]
        if t.validation_rows:
            parts.append(f"greedy on validation before it {t.validation:.3f}")
        if len(step.drawn) and np.isnan(step.drawn).any():
            parts.append(f"{int(np.isnan(step.drawn).sum())} rollouts without a reward")
        parts.append(f"{t.seconds['total']:.1f} s ({generating:.1f} generating, {training:.1f} training), about {duration(left)} left")
        self._world.say("  ".join(parts))
        self.warn_of(counts)
        if step.flat_groups == len(step.drawn) and "flat" not in self._warned:
            self._warned.add("flat")
            self._world.say("warning: in no group did the rewards differ, so there was nothing to learn from in this step (raise group "
                            "or temperature; if all is wrong warm-start further, if all is right take harder rows)")


def _finish(world, greedy: Config, prepared, folder: RunFolder, scorer, policy: Policy, learner, recorder) -> None:
    """Held-out scores (greedy), the adapter, summary.json, and the closing table."""
    heldout, task = None, prepared.task
    if world.rank == 0:     # before what may still go wrong: the result is on the disk
        recorder.check_owned()
        recorder.write_history()
        other = prepared.spectrum.with_factors(policy.parameters.factors(learner.flat))
        try:
            write_folder(folder.adapter, lambda fresh: other.save(fresh, np.zeros(other.dimension)))
        except OSError as error:
            raise UserError(f"{folder.adapter} cannot be written: {error.strerror or error}") from error
    if task.heldout:
        arms = {"base": None, "warm_start": np.zeros(prepared.spectrum.dimension),
                "trained": policy.parameters.placed(learner.flat)}
        world.say(f"scoring base, warm start and trained on {len(task.heldout)} held-out rows")
        heldout = evaluate(greedy, world, scorer, arms, task.heldout, learner.digest())
    else:
        world.say("no held-out rows, so no held-out scores: set heldout_data, or heldout_rows to cut some off task")
    peak = world.peak_gib()
    if world.rank != 0:
        return
    recorder.check_owned()
    summary = summarise(greedy, world.size, len(learner.flat), recorder.history.arrays(), heldout,
                        prepared.warm_start, peak)
    write_json(folder.summary, summary)
    world.say(closing(summary, folder))
    recorder.close_trackers(len(recorder.history), heldout)


def summarise(config: Config, ranks: int, parameters: int, history: dict, heldout, warm_start, peak: float) -> dict:
    """What summary.json holds; as `report.summarise` where the names are the same. peak: GiB of the largest rank."""
    from ..report import basics
    summary = basics(config, ranks, history, heldout, warm_start)
    summary.update(method=title(config), parameters=parameters, group=config.group, lr=config.lr,
                   bytes_reduced=int(history["bytes_reduced"].sum()), bytes_gathered=int(history["bytes_gathered"].sum()),
                   peak_gib=peak)
    return summary
