"""Completions to rewards, the same for training, validation, evaluation and the warm start.

A reward that is missing or not finite comes back as nan, for the caller to count; nothing becomes a silent
zero. Knows nothing of engines or MPI.
"""

from ..config import Config, UserError
from ..tasks import is_file
from .base import Judgement, Reward
from .text import boxed


def load_reward(config: Config) -> Reward:
    """The reward, or the weighted rewards, the config names. Raises UserError if there is none of that name."""
    if not config.rewards:
        return _load(config.reward, config)
    from .several import Several
    return Several({_load(name, config): float(weight) for name, weight in config.rewards.items()}, config)


def _load(name: str, config: Config) -> Reward:
    """One reward. What it needs is imported here, so that the others cost nothing."""
    if name in ("exact", "boxed"):
        from .text import Boxed, Exact
        return {"exact": Exact, "boxed": Boxed}[name](name, config)
    if name == "math":
        from .maths import Math
        return Math(name, config)
    if name == "format":
        from .format import Format
        return Format(name, config)
    if name == "ifeval":
        from .ifeval import IFEval
        return IFEval(name, config)
    if name == "code":
        from .code import Code
        return Code(name, config)
    if name == "model" or name.startswith(("http://", "https://")):
        from .model import Model, Server
        return (Model if name == "model" else Server)(name, config)
    if name == "reasoning_gym":
        _check_gym(config)
        from .gym import ReasoningGym
        return ReasoningGym(name, config)
    from .function import Function, split_name
    split_name(name)
    return Function(name, config)


def _check_gym(config: Config) -> None:
    if is_file(config.task):
        raise UserError(f"config: reward = 'reasoning_gym': needs a reasoning-gym generator, but task = {config.task!r} is "
                        f"a file; use another reward: exact, boxed, math or package.module:function")
    for key in ("validation_data", "heldout_data"):
        if getattr(config, key):
            raise UserError(f"config: reward = 'reasoning_gym': can only judge rows of its generator, but "
                            f"{key} = {getattr(config, key)!r}; set {key.replace('data', 'rows')} instead")
