"""What must go together: settings that are allowed one by one, and do not fit each other, the ranks or the host."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mpitrain import faults
from mpitrain.errors import ConfigError
from mpitrain.model_rules import check_model
from mpitrain.options import show
from mpitrain.recording.asked import ranks_of, steps_of

if TYPE_CHECKING:
    from mpitrain.config import Config

LEAST_EPS = 1e-18  # whose square is not 0 in float32


OF_TRACE = {"trace_ops": 10, "trace_limit": 64}
"""Options that mean something with --trace, and their defaults."""


def check_settings(config: Config) -> None:
    """Refuse settings that are allowed one by one and do not go together."""
    check_model(config)
    batch, microbatches = config.batch, config.microbatches
    if batch % microbatches:
        near = max(microbatches, round(batch / microbatches) * microbatches)
        raise ConfigError(
            f"--batch {batch} is not divisible by --microbatches {microbatches}: all micro-batches must have the same "
            f"size.  Try --batch {near}{_or_microbatches(batch, microbatches)}."
        )
    if config.steps is not None and config.budget is not None:
        raise ConfigError(
            f"--steps {config.steps} and --budget {config.budget:g}: give one of the two; the budget only finds the "
            "number of steps."
        )
    if config.warmup >= 1 and config.warmup != int(config.warmup):
        raise ConfigError(
            f"--warmup {config.warmup:g}: must be a share from 0 to below 1, or a whole number of steps from 1."
        )
    if config.steps is not None and config.warmup > config.steps:
        raise ConfigError(f"--warmup {config.warmup:g}: must be from 0 to the number of steps, {config.steps}.")
    if config.recompute_budget is not None and config.recompute == "full":
        raise ConfigError(
            f"--recompute-budget {config.recompute_budget:g} and --recompute full: the budget says which blocks are "
            "made again; leave one of the two out."
        )
    _check_gist(config)
    _check_scale(config)
    _check_experts(config)
    _check_reducer(config)
    _check_offload(config)
    if config.faults is not None:
        faults.parse(config.faults)
    if config.lr_final and config.lr_schedule not in ("cosine", "linear"):
        raise ConfigError(
            f"--lr-final {config.lr_final:g} is for --lr-schedule cosine and linear: {config.lr_schedule} has no end."
        )
    lr_factors(config)
    frozen(config)
    if config.optimizer == "adafactor" and config.eps < LEAST_EPS:
        raise ConfigError(
            f"--eps {config.eps:g}: --optimizer adafactor adds its square to squared gradients and divides by them; it"
            f" must be {LEAST_EPS:g} or more."
        )
    if config.resume in ("latest", "auto") and config.run is None:
        raise ConfigError(f"--resume {config.resume}: needs --run DIR, the folder whose newest checkpoint is meant.")
    if config.init is not None and config.resume not in (None, "auto"):
        raise ConfigError(
            f"--init {show(config.init)} and --resume {show(config.resume)}: a run that goes on has weights.  Leave one"
            " out; or take --resume auto, which begins with --init where there is no checkpoint yet."
        )
    for name, unset in OF_TRACE.items():
        if not config.trace and getattr(config, name) != unset:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(config, name)} is for --trace: nothing is traced.")
    _check_recording(config)
    _check_data(config)
    if config.async_save and not config.save_every:
        raise ConfigError("--async-save is for --save-every N: a run that stops waits for its last checkpoint anyway.")


SINKS = ("csv", "tensorboard")
"""What metrics can be written as besides `metrics.jsonl`."""
TRAINED = "bpe:"
"""How `--tokenizer` begins where a tokenizer is made of the text."""
FEWEST_WORDS, MOST_WORDS = 257, 1 << 18
"""Of such a tokenizer: it has the 256 bytes and a special word at the least."""


def words_asked(tokenizer: str | None) -> int | None:
    """How many words `bpe:8000` asks for; None: it names a file, or nothing.

    Raises:
        ConfigError: the number is none, or not allowed.
    """
    if tokenizer is None or not tokenizer.startswith(TRAINED):
        return None
    number = tokenizer.removeprefix(TRAINED)
    if not (number.isascii() and number.isdigit() and len(number) < 8 and FEWEST_WORDS <= int(number) <= MOST_WORDS):
        raise ConfigError(
            f"--tokenizer {show(tokenizer)}: the number of words must be from {FEWEST_WORDS} (256 bytes and a special"
            f" word) to {MOST_WORDS}, as in bpe:8000."
        )
    return int(number)


def _check_data(config: Config) -> None:
    """Words that can be made, and kinds of metrics that there are."""
    words_asked(config.tokenizer)
    if odd := sorted(config.sinks - {*SINKS}):
        raise ConfigError(
            f"--metrics {show(config.metrics)}: {show(odd[0])} must be one of {', '.join(SINKS)}, several joined by"
            " commas; metrics.jsonl is always written."
        )


def _check_recording(config: Config) -> None:
    """Which ranks and steps are recorded; of a start that does not know its steps yet, none of them."""
    unset = {"record_ranks": None, "record_steps": None, "record_sent": "values"}
    for name, default in unset.items():
        value = getattr(config, name)
        if config.record is None and value != default:
            raise ConfigError(f"--{name.replace('_', '-')} {show(value)} is for --record DIR: nothing is recorded.")
    if config.record_ranks is not None:
        ranks_of(config.record_ranks)
    if config.record_steps is None:
        return
    first, last = steps_of(config.record_steps)
    if config.steps is None and config.resume is None:
        raise ConfigError(
            f"--record-steps {first}:{last}: needs --steps N.  With --budget, steps are timed before the first one, and"
            " these are none of them."
        )
    if config.steps is not None and first > config.steps:
        raise ConfigError(f"--record-steps {first}:{last}: the run has {config.steps} steps.")


def _check_gist(config: Config) -> None:
    """Rounding goes with what every layout does alike: what is saved for attention differs from way to way."""
    if config.gist in (None, "lossless"):
        return
    rounded = f"--gist {config.gist} rounds queries, keys and values"
    if config.recompute == "none":
        raise ConfigError(
            f"--gist {config.gist} and --recompute none: the scores of attention would wait exactly, and take more than"
            " rounding saves.\nTake --recompute selective, which makes them again, or --gist lossless."
        )
    if config.cp > 1 and config.cp_attention == "rsa":
        raise ConfigError(
            f"{rounded}, but --cp-attention rsa keeps probabilities as well: it would be another training run than that"
            " of one rank.\nTake ring or ulysses, or --gist lossless."
        )
    if config.num_slices > 1:
        raise ConfigError(
            f"{rounded}, which slices of a sequence need of earlier ones exactly: it would be another training run than"
            " that of one rank.\nTake another --schedule than terapipe, or --gist lossless."
        )


def _check_scale(config: Config) -> None:
    """A scale and a window where they are used, and a scale that rounds nothing."""
    scale, window, scaling = config.loss_scale, config.loss_scale_window, config.scaling
    unless = f", what {config.dtype} has unless told otherwise," if config.loss_scaling is None else ""
    if scale is not None and scaling not in ("dynamic", "static"):
        raise ConfigError(
            f"--loss-scale {scale:g} is for --loss-scaling dynamic and static: {scaling}{unless} does not use it."
        )
    if window is not None and scaling != "dynamic":
        raise ConfigError(
            f"--loss-scale-window {window} is for --loss-scaling dynamic: {scaling}{unless} does not use it."
        )
    if scale is not None and math.frexp(scale)[0] != 0.5:
        raise ConfigError(
            f"--loss-scale {scale:g}: must be a power of two, as 65536, or every gradient is rounded twice."
        )


OF_EXPERTS = {
    "router": None,
    "top_k": 1,
    "capacity_factor": None,
    "dropless": False,
    "renormalize": False,
    "moe_every": 1,
    "balance_loss": None,
    "z_loss": 0.0,
    "jitter": 0.0,
    "ep": 1,
    "expert_overlap": False,
}
"""Options that mean nothing where there are no experts, and what they are then."""


def _check_experts(config: Config) -> None:
    """Options of experts where there are some, and numbers of them that go together."""
    routing = config.routing
    if routing is None:
        given = [name for name, unset in OF_EXPERTS.items() if getattr(config, name) != unset]
        if given:
            value = getattr(config, given[0])
            shown = "" if value is True else f" {value:g}" if isinstance(value, float) else f" {value}"
            raise ConfigError(
                f"--{given[0].replace('_', '-')}{shown} is for a mixture of experts: give their number with --experts."
            )
        return
    if config.dropless and config.recompute_budget is not None:
        raise ConfigError(
            f"--dropless and --recompute-budget {config.recompute_budget:g}: how many tokens an expert takes is only "
            "known when they come, so no budget can be kept.\nGive --capacity-factor, or take --recompute full."
        )
    if config.dropless and config.capacity_factor is not None:
        raise ConfigError(
            f"--dropless and --capacity-factor {config.capacity_factor:g}: experts that take all that come have no "
            "capacity; leave one of the two out."
        )
    if config.moe_every > config.layers:
        raise ConfigError(f"--moe-every {config.moe_every}: no block of --layers {config.layers} would have experts.")
    if config.experts is not None and config.experts % config.ep:
        raise ConfigError(f"--experts {config.experts} is not divisible by --ep {config.ep}: ranks hold as many each.")
    if config.expert_overlap and (config.ep == 1 or config.experts == config.ep):
        why = "no tokens travel" if config.ep == 1 else "a rank has a single expert, so there are no halves"
        raise ConfigError(
            f"--expert-overlap with --experts {config.experts} and --ep {config.ep}: {why}; leave it out."
        )


OF_REDUCERS = {
    "powersgd_rank": ("powersgd", 4),
    "powersgd_start": ("powersgd", 0),
    "powersgd_tables": ("powersgd", False),
    "powersgd_fixed": ("powersgd", False),
    "powersgd_feedback": ("powersgd", True),
    "staleness": ("stale", 1),
    "stale_start": ("stale", 0),
    "stale_workers": ("stale", False),
    "local_steps": ("local", 8),
    "average_moments": ("local", False),
}
"""Options that mean something for one reducer only: which, and their defaults."""


ASYNCHRONOUS = ("stale", "local")
"""Reducers that do not compute what synchronous training does."""


def _check_asynchronous(config: Config) -> None:
    """What late gradients and workers that learn apart do not go together with."""
    name, steps = config.reducer, config.local_steps
    if config.zero:
        raise ConfigError(
            f"--reducer {name} and --zero {config.zero}: it works with whole gradients and weights on every rank; take"
            " --zero 0, or --reducer flat."
        )
    if config.stale_workers and not config.staleness:
        raise ConfigError("--stale-workers and --staleness 0: no worker would be late; give --staleness 1 or more.")
    if config.stale_workers and config.stale_start:
        raise ConfigError(
            f"--stale-workers and --stale-start {config.stale_start}: workers are late from the first step on; leave"
            " one of the two out."
        )
    if config.average_moments and config.optimizer == "adafactor":
        raise ConfigError(
            "--average-moments and --optimizer adafactor: it keeps sums of rows and columns, whose means are not those"
            " of any gradient; take adamw or sgd."
        )
    for option in ("save_every", "stop_after") if name == "local" else ():
        value = getattr(config, option)
        if value and value % steps:
            near = max(steps, round(value / steps) * steps)
            raise ConfigError(
                f"--{option.replace('_', '-')} {value} is not divisible by --local-steps {steps}: a checkpoint holds"
                f" the average of the workers, which must not come early for its sake.  Try {near}."
            )


OFFLOADABLE = ("optimizer", "activations", "parameters")
_SIZE = re.compile(r"([0-9]{1,12})(?:\.([0-9]{1,6}))?(B|KiB|MiB|GiB|TiB)")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def memory_size(text: str, option: str = "--memory-budget") -> int:
    """Bytes of `512MiB` or `1.5GiB`, the value of an option.

    Raises:
        ConfigError: it reads otherwise.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option} {show(text)}: must be a number of B, KiB, MiB, GiB or TiB, as 2GiB.")
    return int(float(f"{match[1]}.{match[2] or 0}") * _UNITS[match[3]])


def _check_offload(config: Config) -> None:
    """What is offloaded, where to, and what does not go together with it."""
    asked, budget = config.offloads, config.memory_budget
    if budget is not None:
        memory_size(budget)
    kind, colon, folder = config.offload_to.partition(":")
    if not ((kind == "host" and not colon) or (kind == "hdf5" and folder)):
        raise ConfigError(
            f"--offload-to {show(config.offload_to)}: must be host, or hdf5:DIR with a folder on a disk of this host."
        )
    if asked is None and budget is None:
        if config.offload_to != "host":
            raise ConfigError(
                f"--offload-to {show(config.offload_to)} is for --offload and --memory-budget: nothing is offloaded."
            )
        return
    odd = [word for word in asked or () if word not in OFFLOADABLE]
    if odd:
        raise ConfigError(
            f"--offload {show(config.offload)}: {show(odd[0])} must be one of {', '.join(OFFLOADABLE)}, several joined"
            " by commas, or none alone."
        )
    for refused, why in unfit_for_offload(config, asked or frozenset()):
        raise ConfigError(f"--offload {config.offload} and {refused}: {why}.")


def unfit_for_offload(config: Config, what: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Options that do not go together with what is offloaded, and why."""
    overlaps = config.pp > 1 and config.schedule.startswith("pipedream")
    if what & {"optimizer", "parameters"} and config.optimizer == "adafactor":
        yield (
            "--optimizer adafactor",
            (
                "it looks at whole matrices, and keeps only a number a row and column of them; take --offload"
                " activations, or --optimizer adamw"
            ),
        )
    if what & {"optimizer", "parameters"} and config.reducer == "local":
        yield "--reducer local", "workers average weights that are here; take another reducer"
    if "parameters" in what:
        if config.reducer not in ("flat", "bucketed"):
            yield f"--reducer {config.reducer}", "it works with whole gradients that are here; take --reducer flat"
        if config.zero in (1, 2):
            yield f"--zero {config.zero}", "weights that come when they are used are those of --zero 3; take 3, or 0"
        if config.scaling == "blocks":
            yield "--loss-scaling blocks", "gradients in a store have one scale; take dynamic"
        if config.tied and config.pp > 1:
            yield "--tied with --pp", "two stages hold one table; take --untied"
        if config.memory:
            yield "--memory", "it tells what is here of weights that always are; leave it out"
    if overlaps and what & {"optimizer", "parameters"}:
        yield f"--schedule {config.schedule}", "its stages keep versions of their weights; take --schedule 1f1b"
    if "activations" in what:
        if config.recompute_budget is not None:
            yield (
                f"--recompute-budget {config.recompute_budget:g}",
                ("both choose what waits for backward; take --memory-budget alone, with --recompute full if need be"),
            )
        if config.dropless:
            yield "--dropless", "nobody knows how much experts will keep; give --capacity-factor"


def _check_reducer(config: Config) -> None:
    """Options of a reducer where it is asked for, and reducers that go together with what else is."""
    for option, (its, default) in OF_REDUCERS.items():
        value = getattr(config, option)
        if value != default and config.reducer != its:
            flag = option.replace("_", "-")
            shown = f"--{flag}" if value is True else f"--no-{flag}" if value is False else f"--{flag} {value}"
            raise ConfigError(f"{shown} is for --reducer {its}; --reducer {config.reducer} does not use it.")
    if config.reducer in ASYNCHRONOUS:
        _check_asynchronous(config)
    if config.reducer == "powersgd" and config.zero:
        raise ConfigError(
            f"--reducer powersgd and --zero {config.zero}: factors are made of whole gradients, of which ranks would"
            " keep rows.\nTake --zero 0, or --reducer flat."
        )


def frozen(config: Config) -> tuple[str, ...]:
    """The patterns of `--freeze`, as `Module.freeze` takes them.

    Raises:
        ConfigError: one is empty or means a head that is not there, or scales of branches would lack a gradient.
    """
    if config.freeze is None:
        return ()
    patterns = tuple(part.strip() for part in config.freeze.split(","))
    if not all(pattern.removeprefix("!") for pattern in patterns):
        raise ConfigError(
            f"--freeze {show(config.freeze)}: an empty pattern; give names of parameters or parts with commas between,"
            " as table,blocks.0,*.bias, or '*,!head' for all but the head."
        )
    of_head = [pattern for pattern in patterns if pattern.removeprefix("!").split(".")[0] == "head"]
    if config.tied and of_head:
        raise ConfigError(
            f"--freeze {show(config.freeze)}: {show(of_head[0])} means no weight here, for with --tied the head is the"
            " token table.\nSay table, or give --untied."
        )
    if config.scaling == "blocks":
        raise ConfigError(
            "--loss-scaling blocks with --freeze: a branch whose weights are frozen has no gradient by which its scale"
            " could be found.\nTake --loss-scaling dynamic."
        )
    return patterns


def lr_factors(config: Config) -> list[tuple[str, float]]:
    """What `--lr-groups` says: patterns of names, and the factor of each on the learning rate.

    Raises:
        ConfigError: it says something else.
    """
    factors = []
    for part in config.lr_groups.split(",") if config.lr_groups is not None else ():
        pattern, _, word = part.strip().rpartition("=")
        try:
            factor = float(word)
        except ValueError:
            factor = math.nan
        if not pattern or "=" in pattern or not 0 <= factor < math.inf:
            raise ConfigError(
                f"--lr-groups {show(config.lr_groups)}: {show(part.strip())} must be a pattern of names, = and a factor"
                " of 0 or more, as in table.*=0.5,*.bias=2."
            )
        factors.append((pattern, factor))
    return factors


def _or_microbatches(sequences: int, wanted: int, group: int = 1) -> str:
    """` or --microbatches 4`: as many as divide a rank's sequences, a multiple of `group`; '' if there are none."""
    fitting = [n for n in range(group, min(sequences, 2**16) + 1, group) if sequences % n == 0]
    return f" or --microbatches {min(fitting, key=lambda n: abs(n - wanted))}" if fitting else ""


def check_layout(config: Config, dp: int) -> None:
    """Refuse sizes that cannot be cut evenly over the ranks.

    Args:
        config: the settings.
        dp: ranks over which the batch is divided.

    Raises:
        ConfigError: batch, heads or sequence do not divide.
    """
    parts = dp * config.microbatches
    if config.batch % parts:
        near = max(parts, round(config.batch / parts) * parts)
        raise ConfigError(
            f"--batch {config.batch} is not divisible by {parts} (--dp {dp} x --microbatches {config.microbatches}): "
            f"every micro-batch of every rank needs as many sequences.  Try --batch {near}"
            + (_or_microbatches(config.batch // dp, config.microbatches) if config.batch % dp == 0 else "")
            + "."
        )
    _check_heads(config)
    _check_sequence(config)
    _check_pipeline(config, dp)


def _check_pipeline(config: Config, dp: int) -> None:
    """What the schedule asks of the number of micro-batches, and of what it can go together with.

    On one stage every schedule is the same work, so nothing is asked of it there.
    """
    pp, m, name = config.pp, config.microbatches, config.schedule
    if config.stage_layers is not None:
        _check_stage_layers(config)
    if pp == 1:
        return
    for option, value, its in (("chunks", config.chunks, "interleaved"), ("slices", config.slices, "terapipe")):
        if value not in (None, 1) and name != its:
            raise ConfigError(f"--{option} {value} is for --schedule {its}; --schedule {name} has none.")
    if config.num_chunks > 1 and m % pp:
        fits = _or_microbatches(config.batch // dp, m, pp)
        raise ConfigError(
            f"--schedule interleaved: --microbatches {m} is not divisible by --pp {pp}: the stages of a rank take turns"
            f" in groups of {pp}.  Try{fits.removeprefix(' or') + ', or' if fits else ''} --schedule 1f1b."
        )
    if name == "pipedream" and m != 1:
        raise ConfigError(
            f"--schedule pipedream updates after every batch, which is not cut: --microbatches {m} must be 1.  "
            "pipedream-2bw adds up the gradients of several."
        )
    if name == "pipedream-2bw" and m < pp:
        raise ConfigError(
            f"--schedule pipedream-2bw: --microbatches {m} must be --pp {pp} or more, or two versions of the weights "
            "do not suffice."
        )
    if name == "pipedream" and (config.dtype == "float16" or config.scaling != "none"):
        shown = "--dtype float16" if config.dtype == "float16" else f"--loss-scaling {config.scaling}"
        raise ConfigError(
            f"--schedule pipedream and {shown}: a step whose gradients overflow must be skipped by all stages, which "
            "update at different times here; take --dtype bfloat16, or pipedream-2bw."
        )
    if name in ("pipedream", "pipedream-2bw") and config.reducer in ASYNCHRONOUS:
        raise ConfigError(
            f"--schedule {name} and --reducer {config.reducer}: either is late in a way of its own, and together nobody"
            " could say what is computed; take --schedule 1f1b, or --reducer flat."
        )
    if name in ("pipedream", "pipedream-2bw") and config.reducer == "powersgd":
        raise ConfigError(
            f"--schedule {name} and --reducer powersgd: what a step leaves out would come back with gradients of other "
            "versions of the weights; take --schedule 1f1b, or --reducer flat."
        )
    if name in ("pipedream", "pipedream-2bw") and config.zero:
        raise ConfigError(
            f"--schedule {name} and --zero {config.zero}: stages compute with older versions of their weights, and rows"
            " of other ranks come in the newest only; take --schedule 1f1b, or --zero 0."
        )
    _check_schedule_of_experts(config)
    unfit = {
        "pipedream": ("cp", "sequence_parallel", "clip", "tied"),
        "pipedream-2bw": ("cp", "sequence_parallel"),
        "terapipe": ("cp", "sequence_parallel"),
    }
    for option in unfit.get(name, ()):
        value = getattr(config, option)
        if value > (option == "cp"):
            raise ConfigError(_refusal(name, option, value))
    if config.num_slices > config.seq_len:
        raise ConfigError(
            f"--slices {config.num_slices}: a sequence of {config.seq_len} tokens has not so many slices."
        )


def _check_schedule_of_experts(config: Config) -> None:
    """What asynchronous and sliced pipelines cannot do with experts."""
    name, routing = config.schedule, config.routing
    if routing is None:
        return
    if name in ("pipedream", "pipedream-2bw"):
        raise ConfigError(
            f"--schedule {name} and --experts {config.experts}: it goes together with --dp and --tp of models without "
            "experts only; take --schedule 1f1b."
        )
    if name == "terapipe" and (routing.capacity_factor is not None or routing.balance_loss):
        raise ConfigError(
            f"--schedule terapipe and --experts {config.experts}: room and balance of experts are those of whole "
            "sequences, which no slice knows; give --dropless and --balance-loss 0, or take --schedule 1f1b."
        )


def _refusal(schedule: str, option: str, value: Any) -> str:
    """Why a schedule does not go together with an option, and the way out."""
    shown = f"--{option.replace('_', '-')}" + ("" if value is True else f" {value:g}")
    why = {
        "cp": "attention over several ranks needs whole steps and sequences; leave --cp out",
        "sequence_parallel": "it goes together with --dp and --tp only; leave --sequence-parallel out",
        "clip": "stages update at different times, so nobody knows the global norm: give --clip 0, or take "
        "pipedream-2bw",
        "tied": "the two stages that share the table update at different times: give --untied, or take pipedream-2bw",
    }
    return f"--schedule {schedule} and {shown}: {why[option]}."


def _check_stage_layers(config: Config) -> None:
    """Blocks of each stage: as many numbers as stages, which sum to the layers."""
    given = config.stage_layers or ""
    words = given.split(",")
    stages = config.pp * config.num_chunks
    if not all(word.isascii() and word.isdigit() and len(word) < 5 for word in words):
        raise ConfigError(f"--stage-layers {show(given)}: must be whole numbers joined by commas, as 3,2,2,1.")
    if len(words) != stages or sum(map(int, words)) != config.layers:
        raise ConfigError(
            f"--stage-layers {given}: blocks for {len(words)} of {stages} stages, {sum(map(int, words))} of the model's"
            f" {config.layers}; give a number for each of the {stages}, 0 or more, whose sum is {config.layers}."
        )


def _check_heads(config: Config) -> None:
    """Whole heads for every rank of tp, and with Ulysses of tp x cp."""
    tp, heads = config.tp, config.heads
    groups = config.kv_heads if config.kv_heads is not None else heads
    if heads % tp:
        raise ConfigError(f"--heads {heads} is not divisible by --tp {tp}: every rank needs whole heads.")
    if groups % tp and tp % groups:
        raise ConfigError(f"--kv-heads {groups} and --tp {tp}: one of the two must be a multiple of the other.")
    here = heads // tp, max(1, groups // tp)
    if config.cp_attention == "ulysses" and (here[0] % config.cp or here[1] % config.cp):
        raise ConfigError(
            f"--cp-attention ulysses cuts heads: {here[0]} heads of queries and {here[1]} of keys a rank of --tp are "
            f"not both divisible by --cp {config.cp}.  Take --cp-attention ring, which cuts none."
        )


def _check_sequence(config: Config) -> None:
    """As many tokens for every rank of cp, and with sequence parallelism for every rank of tp among them."""
    cp, tp = config.cp, config.tp if config.sequence_parallel else 1
    halves = 2 if config.cp_attention == "ring" and cp > 1 else 1
    parts = math.lcm(halves * cp, cp * tp)
    if config.seq_len % parts:
        near = max(parts, round(config.seq_len / parts) * parts)
        why = [f"--cp {cp}" + (" (ring attention gives each rank an early and a late part)" if halves == 2 else "")] * (
            cp > 1
        ) + [f"--tp {tp} with --sequence-parallel"] * (tp > 1)
        raise ConfigError(
            f"--seq-len {config.seq_len} is not divisible by {parts}: {' and '.join(why)}.  Try --seq-len {near}."
        )


def check_memory(
    config: Config, num_parameters: int, dp: int, of_experts: int, memory: int, ranks: int, of_device: bool = False
) -> None:
    """Refuse a model that certainly does not fit, before anything is allocated.

    Counts what every rank holds at the least: its part of weights, gradients and two moments, with ZeRO its rows of
    them, and of the input of every block for one micro-batch.

    Args:
        config: the settings.
        num_parameters: of the whole model.
        dp: ranks over which the batch is divided.
        of_experts: parameters among them that are weights of experts, which ep divides.
        memory: bytes of the host, or of a device.
        ranks: how many share them.
        of_device: whether they are a device's, which all leaves that is offloaded.

    Raises:
        ConfigError: it needs more than there is.
    """
    size = 8 if config.dtype == "float64" else 4  # of masters, gradients and moments
    stored = 2 if config.dtype in ("float16", "bfloat16") else size
    moments = {"adamw": 2, "sgd": 1}.get(config.optimizer, 0)
    if config.pp > 1:  # those of the first stage, which keeps most
        moments += {"pipedream": config.pp - 1, "pipedream-2bw": 1}.get(config.schedule, 0)
    rows = config.batch // (dp * config.microbatches)
    masters = size if stored < size else 0
    whole = [stored * (config.zero < 3), size * (config.zero < 2), (masters + moments * size) * (config.zero < 1)]
    cut = stored + size + masters + moments * size - sum(whole)  # bytes a weight of which ranks keep rows
    weights = 0
    for held, parts in (
        (num_parameters - of_experts, dp * config.cp),
        (of_experts // config.ep, dp // config.ep * config.cp),
    ):
        weights += (sum(whole) * held + cut * held // parts) // (config.tp * config.pp)
    stream = config.cp * (config.tp if config.sequence_parallel else 1)  # ranks over which it is cut
    activations = rows * config.seq_len * config.width * config.layers * stored // (stream * config.pp)
    if (of_device or config.offload_to != "host") and (config.offloads or config.memory_budget is not None):
        return  # most of it will be elsewhere
    needed = (weights + activations) * ranks
    if needed > memory:
        place = "their device" if of_device else "this machine"
        drops_zero = config.pp > 1 and config.schedule.startswith("pipedream")
        experts = "" if config.experts is None else f" --experts {config.experts}"
        raise ConfigError(
            f"--layers {config.layers} --width {config.width} --seq-len {config.seq_len} --batch {config.batch}"
            f"{experts}: {num_parameters} parameters need at least {needed / 2**30:.1f} GiB on {ranks} ranks,\n"
            f"but {place} has {memory / 2**30:.1f} GiB.  Choose smaller sizes, or more --microbatches"
            + (", or --zero 3." if dp * config.cp > 1 and config.zero < 3 and not drops_zero else ".")
        )
