"""`python -m essa_mpi run`: from a config to a run folder with an evolved adapter in it."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from . import config as configuration
from . import trace, trackers
from .choose import settle_mode
from .config import Config, UserError
from .departure import LEAVE, LEFT, Departure
from .answers import Answers
from .evolve import Generation, advice, evolve, new_search
from .files import check_writable, write_folder, write_json
from .provenance import hash_model, provenance, warm_start
from .rounding import warning as rounding_warning
from .record import Record, duration
from .runfile import STARTED, RunFolder, history_schema, load_checkpoint, lock
from .search import choose
from .shares import Balance
from .tasks import SPLITS
from .watchdog import Watchdog
from .world import Agreed, World


def run(world: World, config: Config, resume: bool, scorer_factory=None, trace_file: str | None = None) -> None:
    """Evolve as `config` says; every rank calls this. Ends with SystemExit or MPI_Abort on failure.

    scorer_factory(config, spectrum, task) -> scorer replaces the engine and reward (tests). trace_file: see `trace`.
    """
    prepared = prepare(world, config, trace_file)
    folder, checkpoint, held = open_folder(world, config, prepared, resume)
    world.failure_file = str(folder.path / "failed.txt")
    world.install_hooks()
    world.balance = Balance(world.size) if config.balance else None
    config = settle_mode(world, config, folder, checkpoint)
    search, answers = new_search(config, prepared.spectrum.dimension), Answers(prepared.spectrum.dimension)
    if checkpoint:
        try:
            search.load_state(checkpoint["search"])
        except ValueError as error:
            world.agree(UserError(f"--resume: {checkpoint['path']}: {error}"))
        if "answers" in checkpoint:     # not in those of release 0.1
            answers.load_state(checkpoint["answers"])
    recorder = (Recorder(world, config, prepared, folder, search, answers, checkpoint, engine=scorer_factory is None)
                if world.rank == 0 else None)
    start = search.generation
    if checkpoint:
        world.say(f"resuming {folder.path} at generation {start} of {config.generations}")
    D, size = prepared.spectrum.dimension, world.size
    world.say(f"{config.name}: {D} singular values, population {config.population} x {config.batch} rows, "
              f"{search_name(config, D)}, mode {config.mode}, {size} rank{'s' * (size > 1)}")

    scorer = start_scorer(world, config, prepared, folder, scorer_factory)
    if recorder:
        recorder.start_trackers()
    if config.hang_seconds and world.size > 1:
        world.watchdog = Watchdog(world, config.hang_seconds)
    if trace_file:
        trace.start(world)
    departure = Departure(config.max_seconds, config.walltime_seconds, recorder.elapsed() if recorder else 0.0)
    if evolve(config, world, prepared.task, scorer, search, answers, start,
              recorder.record if recorder else lambda g: None, departure) & LEAVE:
        trace.write(world, trace_file)
        leave(world, folder, prepared)
    world.leave_on_signal(goes_on(folder), LEFT)      # what is left to score changes nothing on the disk
    _finish(world, config, prepared, folder, scorer, search, answers, recorder)
    trace.write(world, trace_file)
    prepared.reward.close()
    if held:
        held.close()


def goes_on(folder: RunFolder) -> str:
    return f"leaving as asked, checkpointed: continue {folder.path} with --resume (exit code {LEFT})"


def leave(world: World, folder: RunFolder, prepared) -> None:
    """All ranks leave, checkpointed: the scheduler, or the walltime, wants it."""
    world.say(goes_on(folder))
    prepared.reward.close()
    raise Agreed(LEFT)


def search_name(config: Config, D: int) -> str:
    """The search in words; `auto` says what it took and why."""
    if config.search != "auto":
        return f"{config.search} search"
    kind, why = choose(D)
    return f"search auto: {kind} ({why})"


class Prepared:
    """What every rank reads for itself before anything is written: adapter, rows, reward."""

    def __init__(self, config: Config):
        """Raises UserError for whatever the user can mend."""
        from .rewards import load_reward
        from .rows import Rows
        from .spectrum import Spectrum, check_fits, check_model, model_shapes
        from .tasks import load_task
        check_model(config.model)
        self.spectrum = Spectrum.load(config.adapter, config.alpha, config.offsets, config.offset_scale)
        shapes = model_shapes(config.model)
        if shapes:
            check_fits(self.spectrum, config.model, shapes)
        self.task = load_task(config)
        if config.answer == "validated" and not self.task.validation:
            raise UserError("config: answer = 'validated': there are no validation rows; set validation_data or "
                            "validation_rows, or another answer")
        self.rows_hash = f"{self.task.digest():016x}"
        self.warm_start = warm_start(config.adapter)    # read with the adapter: later it may be another's
        self.reward = load_reward(config)
        for rows in (self.task.train, self.task.validation, self.task.heldout):
            self.reward.check(rows)
        Rows(config, len(self.task.train))     # refuses a train split that is too small
        self.model_hash = hash_model(config.model)


def prepare(world: World, config: Config, trace_file: str | None = None) -> Prepared:
    prepared, error = None, None
    try:
        if world.rank == 0:
            trackers.check(config.trackers)
            if trace_file:
                check_writable("--trace", trace_file)
        prepared = Prepared(config)
    except Exception as e:
        error = e
    world.agree(error)
    try:
        world.agree_equal(config=configuration.dump(config), model=prepared.model_hash,
                          adapter=prepared.spectrum.digest(), rows=prepared.rows_hash,
                          reward=prepared.reward.digest())
    except UserError as e:
        error = e
    world.agree(error)
    for note in prepared.task.notes:
        world.say(note)
    return prepared


def provenance_of(world: World, config: Config, prepared: Prepared) -> dict:
    """The attributes of the run's files."""
    return provenance(configuration.dump(config), ranks=world.size, seed=config.seed, mode=config.mode,
                      **{key: value for key, (value, _) in inputs(config, prepared).items()},
                      rows=json.dumps({split: len(getattr(prepared.task, split)) for split in SPLITS}),
                      hosts=" ".join(sorted(set(world.hosts))))


def inputs(config: Config, prepared: Prepared) -> dict[str, tuple[str, str]]:
    """What a resumed run must find unchanged: attribute -> (hash, what it is)."""
    return {"model_hash": (prepared.model_hash, f"the model {config.model}"),
            "adapter_hash": (prepared.spectrum.source, f"the adapter {config.adapter}"),
            "rows_hash": (prepared.rows_hash, f"the rows of {config.task}"),
            "reward_hash": (prepared.reward.digest(), f"the file of the reward {config.reward if not config.rewards else ', '.join(config.rewards)}")}


def open_folder(world: World, config: Config, prepared: Prepared, resume: bool, command: str = "run"):
    """(RunFolder, what to resume from or None, the lock), rank 0's but for the lock; rank 0 touches the disk.

    command: run or grpo, which continue only what they started.
    """
    folder = state = error = held = None
    if world.rank == 0:
        try:
            held = lock(config.name)
            if resume and (Path("runs") / config.name).exists():
                folder = RunFolder.open(Path("runs") / config.name)
                if (other := folder.command) != command:
                    raise UserError(f"--resume: {folder.path} was started by `{other}`; continue it with that command")
                configuration.check_resumable(configuration.load(folder.config), config)
                found = load_checkpoint(folder)
                for note in found.notes if found else []:
                    world.say(note)
                if not found and folder.history.exists():
                    raise UserError(f"--resume: {folder.path} has a history but no checkpoint; put its checkpoints "
                                    f"back, or start again without --resume")
                if found:
                    for key, (mine, what) in inputs(config, prepared).items():
                        if found.attributes.get(key, mine) != mine:
                            raise UserError(f"--resume: {what} changed since {folder.path} was started; put it back, "
                                            f"or start a new run without --resume")
                    if found.generation > config.generations:
                        raise UserError(f"--resume: generations = {config.generations} but {folder.path} is at "
                                        f"{found.generation}; ask for at least that many")
                    state = {**found.groups, "attributes": found.attributes, "path": str(found.path)}
                (folder.path / "failed.txt").unlink(missing_ok=True)
            else:
                if resume:
                    world.say(f"nothing to resume: there is no runs/{config.name}; starting it")
                folder = RunFolder.create(config.name, f"{STARTED}{command}\n{configuration.dump(config)}")
                if folder.note:
                    world.say(folder.note)
            (folder.path / "logs").mkdir(exist_ok=True)
        except Exception as e:
            error = e
    world.agree(error)
    return *world.comm.bcast((folder, state) if world.rank == 0 else None), held


def start_scorer(world, config, prepared, folder, factory):
    """Engine and reward on every rank; their output goes to logs/, not over the progress lines."""
    if factory is not None:
        return factory(config, prepared.spectrum, prepared.task)
    quiet(world, folder.path / "logs" / f"rank{world.rank:04d}.log")
    scorer = error = None
    began = time.perf_counter()
    try:
        from .engine import Engine
        from .evaluate import changes_output
        from .scoring import Scorer
        from .tasks import render
        engine = Engine(config, prepared.spectrum)
        prompts = [render(row, engine.tokenizer, config) for row in prepared.task.train[:4]]
        prompts = [p for p in prompts if len(p) < engine.max_model_len]
        if prompts and not changes_output(engine, prompts, prepared.spectrum.dimension):
            world.say(f"warning: with the adapter {config.adapter} the model answers {len(prompts)} rows exactly as "
                      f"without it: the warm start may be too weak to search around")
        prepared.reward.start()
        scorer = Scorer(engine, prepared.reward, config)
        scorer.warn = lambda line: print(line, file=world.err, flush=True)
    except Exception as e:
        error = e
    world.agree(error)
    world.say(f"engines ready in {time.perf_counter() - began:.0f} s; their logs are in {folder.path}/logs")
    return scorer


def quiet(world: World, log: Path) -> None:
    """Send this process's stdout and stderr to `log`; the world keeps the real ones for its own lines."""
    sys.stdout.flush()
    sys.stderr.flush()
    world.out = os.fdopen(os.dup(1), "w")
    world.err = os.fdopen(os.dup(2), "w")
    target = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


class Recorder(Record):
    """Rank 0's files, and the progress line, of an evolution."""

    def __init__(self, world: World, config: Config, prepared: Prepared, folder: RunFolder, search,
                 answers: Answers, checkpoint: dict | None, engine: bool):
        """engine: False if candidates go into none, so that none can be rounded."""
        super().__init__(world, config, folder, history_schema(config.population), checkpoint, provenance_of(world, config, prepared))
        self._search, self._answers, self._parts = search, answers, prepared.reward.names
        self._spectrum, self._rounding_checked = prepared.spectrum, np.inf if engine else 0.0
        self.check_rounding()

    def check_rounding(self) -> None:
        """Warn, once, if candidates are rounded away; looked at anew each time sigma has halved."""
        if "rounding" in self._warned or self._search.sigma > 0.5 * self._rounding_checked:
            return
        self._rounding_checked = self._search.sigma
        said = rounding_warning(self._spectrum, self._config, self._search.sigma,
                                self._search.ask(self._search.generation)[0], self._search.mean)
        if said:
            self._warned.add("rounding")
            self._world.say(said)

    def record(self, g: Generation) -> None:
        """Write one generation down. Raises UserError if the disk refuses."""
        header, ranks, now = g.exchanged.header, self._world.size, time.time()
        mean = {name: float(header[f"{name}_ns"].mean()) / 1e9 for name in ("place", "generate", "score")}
        wait = g.exchanged.wait_mean
        counts = {name: g.exchanged.total(name) for name in ("completions", "tokens", "cut", "empty", "too_long")}
        finite = g.fitness[np.isfinite(g.fitness)]
        self.history.append(
            g.number, fitness=g.fitness, mean_fitness=float(finite.mean()), best_fitness=float(finite.max()),
            sigma=g.sigma, digest=g.digest, missing=g.missing, tokens=counts["tokens"], cut=counts["cut"],
            empty=counts["empty"], too_long=counts["too_long"], validation=g.validation,
            validation_n=g.validation_rows,
            **{"times/unix": now, "times/seconds": g.seconds["total"], "times/generate": mean["generate"],
               "times/place": mean["place"], "times/score": mean["score"], "times/wait": wait,
               "times/allgather": g.seconds["allgather"], "times/update": g.seconds["update"],
               "times/checkpoint": self.last_checkpoint})
        line = {
            "generation": g.number, "mean_fitness": float(finite.mean()), "best_fitness": float(finite.max()),
            "worst_fitness": float(finite.min()), "sigma": g.sigma, "validation": g.validation,
            "validation_rows": g.validation_rows, "missing": g.missing, **counts, **self._noise(g, counts),
            **self._components(g),
            "bytes_sent_per_rank": g.exchanged.bytes_sent, "allgathers": g.exchanged.count, "ranks": ranks,
            "seconds": {**g.seconds, "wait_mean": wait, "generate_mean": mean["generate"]}}
        self.log(g.number, line, g.scores.samples, now)
        if self.is_due(g.number, bool(header["stop"].any())):
            self.timed(self.checkpoint)
        self._progress(g, counts)
        self.check_rounding()

    def _noise(self, g: Generation, counts: dict) -> dict:
        """How far the fitness can be trusted, and what racing and re-evaluation did about it."""
        scores, found = g.scores, {"batch": g.scores.batch}
        found.update(signal=scores.signal, noise=scores.noise,
                     signal_to_noise=(scores.signal / scores.noise) ** 2 if scores.noise else None)
        if self._config.racing:
            rows = counts["completions"] / max(1, self._config.samples)
            found.update(rows_saved=scores.rows_saved, tokens_saved=scores.rows_saved * counts["tokens"] / max(1, rows))
        if self._config.reevaluate:
            found.update(changed_ranks=scores.changed_ranks)
        return found

    def _components(self, g: Generation) -> dict:
        """The mean of each part of the reward over the population's completions, where it was given."""
        parts = {name: part.given_mean() for name, part in zip(self._parts, g.exchanged.components)}
        return {"components": parts} if parts else {}

    def checkpoint(self, ended: Answers | None = None) -> None:
        """ended: the answers of a run that is over, for `eval` and `export`; one that goes on later starts from its own."""
        self.save(self._search.generation, {"search": self._search.state(), "answers": self._answers.state(),
                                            **({"ended": ended.state()} if ended else {})})

    def _progress(self, g: Generation, counts: dict) -> None:
        left = self.seconds_left(g.number, g.seconds["total"])
        finite = g.fitness[np.isfinite(g.fitness)]
        parts = [f"generation {g.number + 1}/{self._config.generations}", f"fitness {finite.mean():.3f}",
                 f"best {np.max(g.fitness):.3f}", f"sigma {g.sigma:.3g}"]
        if g.validation_rows:
            parts.append(f"mean on validation before it {g.validation:.3f}")
        if g.missing:
            parts.append(f"{g.missing} rows without a score")
        parts.append(f"{g.seconds['total']:.1f} s, about {duration(left)} left")
        self._world.say("  ".join(parts))
        self.warn_of(counts)
        said = advice(g, self._config.sigma)
        if said:
            self._world.say(said)
        elif len(set(g.fitness.tolist())) == 1:
            self._world.say("warning: all candidates scored the same; nothing can be learnt from this generation "
                            "(raise sigma or batch; if all is wrong warm-start further, if all is right take harder rows)")


def _finish(world, config, prepared, folder, scorer, search, answers, recorder) -> None:
    """Held-out scores, the adapter, summary.json, and the closing table."""
    from .evaluate import evaluate
    heldout, task, digest = None, prepared.task, search.digest()
    ended = Answers(search.dimension)
    ended.load_state(answers.state())
    if config.validation_every and task.validation:     # the last mean has not been validated yet
        last = evaluate(config, world, scorer, {"final": search.mean}, task.validation, digest)
        ended.validate(search.mean, last.scores["final"]["accuracy"])
    vectors = ended.vectors(search.mean)
    if config.answer not in vectors:
        world.say(f"warning: answer = {config.answer!r}: the run has none; the final mean is handed over instead")
        config = replace(config, answer="final")
    if world.rank == 0:     # before what may still go wrong: the result is on the disk
        if config.validation_every and task.validation:
            recorder.checkpoint(ended)
        recorder.check_owned()
        recorder.write_history()   # a kill between the last checkpoint and this file leaves it a record short
        save_adapter(prepared.spectrum, vectors[config.answer], folder.adapter)
    if task.heldout:
        arms = {"base": None, "warm_start": np.zeros(search.dimension), "evolved": vectors[config.answer],
                **{name: vector for name, vector in vectors.items() if name != config.answer}}
        ahead = ""
        if recorder and recorder.usual_seconds():
            share = len(arms) * len(task.heldout) / (config.population * config.batch)
            ahead = f", about {duration(share * recorder.usual_seconds())}"
        world.say(f"scoring base, warm start and {len(arms) - 2} answers on {len(task.heldout)} held-out rows{ahead}")
        heldout = evaluate(config, world, scorer, arms, task.heldout, digest)
    else:
        world.say("no held-out rows, so no held-out scores: set heldout_data, or heldout_rows to cut some off task")
    peak = world.peak_gib()
    if world.rank != 0:
        return
    from .report import closing, summarise
    recorder.check_owned()
    summary = summarise(config, world.size, prepared.spectrum.dimension, recorder.history.arrays(), heldout,
                        prepared.warm_start)
    summary["peak_gib"] = peak
    write_json(folder.summary, summary)
    world.say(closing(summary, folder))
    recorder.close_trackers(search.generation, heldout)


def save_adapter(spectrum, vector: np.ndarray, target: Path) -> None:
    """Write a peft folder, whole or not at all. Raises UserError."""
    try:
        write_folder(target, lambda fresh: spectrum.save(fresh, vector))
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}") from error
