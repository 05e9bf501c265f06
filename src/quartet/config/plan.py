"""The resolved plan of a run, in text: what `--dry-run` prints, and a run logs at its start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from quartet.config.counting import Dataset, count_datasets
from quartet.config.derive import (
    attention,
    batch_sizes,
    critic_model,
    needs_critic,
    needs_ref,
    num_ranks,
    push_backend,
    samples_per_rollout,
    split_list,
    train_token_budget,
    trained_model,
    uses_agent,
)
from quartet.config.ds import TrainingFields
from quartet.config.earlier import in_the_way
from quartet.config.machine import Machine
from quartet.config.methods import DpoConfig, PpoConfig, RmConfig, SftConfig, TrainerConfig
from quartet.config.notes import chosen, notes
from quartet.config.placement import Place, places
from quartet.config.rewardparts import reward_source
from quartet.config.runnable import obstacles
from quartet.config.serve import LearnerServeConfig, RefServeConfig, RewardServeConfig, ServeConfig
from quartet.config.support import wanted_engine

_NAMES: Mapping[type, str] = {
    PpoConfig: "ppo",
    SftConfig: "sft",
    RmConfig: "rm",
    DpoConfig: "dpo",
}


def planned_machine(config: TrainerConfig, machine: Machine, origins: Mapping[str, str]) -> Machine:
    """The machine that a plan is for: this one, or one with the GPUs that the flags speak of.

    On a laptop, `--actor.num_gpus_per_node 8` asks what would happen on eight GPUs.
    """
    if machine.num_gpus or not isinstance(config, PpoConfig):
        return machine
    named = [name for name in chosen(config, origins) if name.endswith(".num_gpus_per_node")]
    if not named and config.vllm.tensor_parallel_size == 1:
        return machine
    count = config.actor.num_nodes * config.actor.num_gpus_per_node
    return replace(
        machine,
        num_gpus=count,
        has_vllm=True,
        has_flash_attention=True,
        has_flash_attention_3=True,
        has_ring_attention=True,
        has_liger=True,
    )


def render_plan(
    config: TrainerConfig, machine: Machine, origins: Mapping[str, str] | None = None
) -> str:
    """The plan as text, ending in a new line.

    Args:
        config: a validated training configuration.
        machine: this machine.
        origins: which values were given, as `load` returns them.
    """
    target = planned_machine(config, machine, origins or {})
    lines = [f"Plan of quartet train {_NAMES[type(config)]}", ""]
    lines += _block("Machine", [_machine_line(machine, target)])
    lines += _block("Services", _services(config, target))
    counts = count_datasets(*_dataset(config))
    if isinstance(config, PpoConfig):
        lines += _block("Batches", _ppo_batches(config, target))
        lines += _block("Steps", _ppo_steps(config, counts))
        lines += _block("Algorithm", _ppo_algorithm(config))
        lines += _block("Weights", [_push_line(config, target)])
    else:
        lines += _block("Batches", _offline_batches(config, target))
        lines += _block("Steps", _offline_steps(config, counts))
    lines += _block("Files", _files(config))
    lines += _block("Notes", list(notes(config, target, origins)))
    lines += _block("Here and now", _obstacles(config, machine, target))
    return "\n".join(lines) + "\n"


def render_service(config: ServeConfig, machine: Machine) -> str:
    """What `quartet serve ... --dry-run` prints."""
    room = type(config).__name__.removesuffix("ServeConfig").lower()
    section = getattr(config, room)
    source = (
        reward_source(config.reward)
        if isinstance(config, RewardServeConfig)
        else section.model_name_or_path
    )
    lines = [f"Plan of quartet serve {room}", "", f"  serves     {source}"]
    if isinstance(config, LearnerServeConfig):
        ranks = config.learner.num_ranks or max(machine.num_gpus, 1)
        lines.append(
            f"  head       {config.learner.head}, {_count(ranks, 'rank')}, ZeRO stage "
            f"{config.ds.zero_stage}"
        )
    if not isinstance(config, RewardServeConfig | RefServeConfig | LearnerServeConfig):
        lines.append(f"  engine     {wanted_engine(config, machine)}")
    lines.append(
        f"  weights    {config.ds.param_dtype}, attention "
        f"{attention(config.ds.attn_implementation, machine)}"
    )
    lines.append(f"  listens    {config.rpc.host}:{config.rpc.port or '(any free port)'}")
    lines.append(f"  devices    {_gpus(tuple(range(machine.num_gpus)))}")
    lines += ["", *_block("Here and now", [str(o) for o in obstacles(config, machine)])]
    return "\n".join(lines).rstrip() + "\n"


def _block(title: str, lines: Sequence[str]) -> list[str]:
    return [title, *(f"  {line}" for line in lines), ""] if lines else []


def _machine_line(machine: Machine, target: Machine) -> str:
    if target != machine:
        return f"planned for {_count(target.num_gpus, 'GPU')}; this machine has none"
    return f"{_count(machine.num_gpus, 'GPU')}" if machine.num_gpus else "no GPU: all on the CPU"


def _services(config: TrainerConfig, machine: Machine) -> list[str]:
    """One line a role: how many processes, where, and what they hold."""
    roles: dict[str, list[Place]] = {}
    for place in places(config, machine):
        roles.setdefault(place.role, []).append(place)
    rows = [("trainer", "1 process", "CPU", _trainer_line(config))]
    for role, group in roles.items():
        where = ", ".join(p.address for p in group if p.address) or _devices(group)
        size = "given" if group[0].address else _size(role, group)
        rows.append((role, size, where, _holds(role, group, config, machine)))
    lines = _table(rows)
    if any(not place.address for group in roles.values() for place in group):
        lines.append(
            "The trainer starts those without an address, each at 127.0.0.1 and a free port."
        )
    return lines


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest entry."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _trainer_line(config: TrainerConfig) -> str:
    port = config.metrics.port
    return "the loop" + (f", metrics on {config.metrics.host}:{port}" if port else "")


def _size(role: str, group: Sequence[Place]) -> str:
    if role == "rollout" and group[0].gpus:
        return f"{_count(len(group), 'engine')} x TP {len(group[0].gpus)}"
    if role == "rollout":
        return _count(len(group), "engine")
    if role in ("learner", "critic"):
        return _count(group[0].ranks, "rank")
    return _count(len(group), "replica")


def _devices(group: Sequence[Place]) -> str:
    if not group[0].gpus:
        return "CPU"
    if group[0].role != "rollout":
        return _gpus(tuple(gpu for place in group for gpu in place.gpus))
    return "GPUs " + " | ".join(_range(place.gpus) for place in group)


def _gpus(gpus: Sequence[int]) -> str:
    if not gpus:
        return "CPU"
    return f"GPU {gpus[0]}" if len(gpus) == 1 else f"GPUs {_range(gpus)}"


def _range(gpus: Sequence[int]) -> str:
    return str(gpus[0]) if len(gpus) == 1 else f"{gpus[0]}-{gpus[-1]}"


def _holds(role: str, group: Sequence[Place], config: TrainerConfig, machine: Machine) -> str:
    """The model of a service, and how it is held."""
    if group[0].address:
        return "not started by the trainer"
    ds = config.ds
    training = f"ZeRO stage {ds.zero_stage}, {ds.param_dtype}{_spread(ds)}"
    if not isinstance(config, PpoConfig):
        if role == "ref" and isinstance(config, DpoConfig):
            return str(config.ref.model_name_or_path or config.model.model_name_or_path)
        head = ", new head reward where it has none" if isinstance(config, RmConfig) else ""
        return f"{trained_model(config)}, {training}{head}"
    match role:
        case "learner":
            return f"{config.actor.model_name_or_path}, {training}"
        case "critic":
            return f"{critic_model(config)}, {training}, value head"
        case "reward":
            return reward_source(config.reward)
        case "rollout":
            engine = wanted_engine(config, machine)
            return f"{config.actor.model_name_or_path}, engine {engine}"
        case _:
            return str(config.actor.model_name_or_path)


def _spread(ds: TrainingFields) -> str:
    """How a learner's ranks share layers and sequences; nothing where they do not."""
    tensor = f", TP {ds.tensor_parallel_size}" if ds.tensor_parallel_size > 1 else ""
    return tensor + (f", ring {ds.ring_attn_size}" if ds.ring_attn_size > 1 else "")


def _ppo_batches(config: PpoConfig, machine: Machine) -> list[str]:
    rollout, train = config.rollout, config.train
    samples = samples_per_rollout(config)
    sizes = batch_sizes(samples, train.batch_size)
    steps = f"{len(sizes)} x {train.batch_size} samples"
    if sizes[-1] != train.batch_size:
        full = f"{len(sizes) - 1} x {train.batch_size} and " if len(sizes) > 1 else ""
        steps = f"{full}1 x {sizes[-1]} samples"
    total = len(sizes) * train.max_epochs
    length = f"what the prompt leaves of {config.data.max_len} tokens"
    if rollout.max_new_tokens:
        length = f"{rollout.max_new_tokens} tokens"
    return [
        f"rollout          {rollout.batch_size} prompts x {rollout.n_samples_per_prompt} = "
        f"{_count(samples, 'sample')}, each of at most {length}",
        f"optimizer steps  {total} a rollout: {train.max_epochs} "
        f"{'pass' if train.max_epochs == 1 else 'passes'} of {steps}",
        f"micro-batches    {_micro(config, machine)}",
    ]


def _micro(config: TrainerConfig, machine: Machine) -> str:
    """How many micro-batches one optimizer step takes on a rank."""
    if config.learner.address:
        return "cut by the learner at its address"
    ranks = num_ranks(config, machine) // (
        config.ds.ring_attn_size * config.ds.tensor_parallel_size
    )
    share = -(-config.train.batch_size // max(ranks, 1))
    budget = train_token_budget(config) if isinstance(config, PpoConfig) else None
    if budget is not None:
        budget_of_a_ring = budget * config.ds.ring_attn_size
        most = -(-share // (budget_of_a_ring // config.data.max_len))
        return (
            f"up to {budget} tokens, {_count(share, 'sample')} a rank: "
            f"at most {most} a step when all are {config.data.max_len} tokens long"
        )
    count = -(-share // config.train.micro_batch_size)
    return (
        f"{config.train.micro_batch_size} a pass, {_count(share, 'sample')} a rank: {count} a step"
    )


def _dataset(config: TrainerConfig) -> tuple[Sequence[str], int]:
    if isinstance(config, PpoConfig):
        return split_list(config.data.prompt_dataset), config.data.max_samples
    return split_list(config.data.dataset), config.data.max_samples


def _size_line(what: str, counted: Dataset) -> str:
    if counted.size is None:
        return f"{what:<16} unknown until loaded: {counted.why}"
    return f"{what:<16} {counted.size}"


def _ppo_steps(config: PpoConfig, counted: Dataset) -> list[str]:
    train = config.train
    per_rollout = len(batch_sizes(samples_per_rollout(config), train.batch_size)) * train.max_epochs
    lines = [_size_line("prompts", counted), f"episodes         {train.num_episodes}"]
    if counted.size is None:
        cap = f", at most {train.max_steps}" if train.max_steps else ""
        return [*lines, f"rollouts         prompts / {config.rollout.batch_size} an episode{cap}"]
    rollouts = -(-counted.size // config.rollout.batch_size) * train.num_episodes
    if train.max_steps:
        rollouts = min(rollouts, train.max_steps)
    short = counted.size % config.rollout.batch_size
    tail = f", the last of each episode with {_count(short, 'prompt')}" if short else ""
    most = "at most " if config.algo.dynamic_filtering_enable else ""
    return [
        *lines,
        f"rollouts         {most}{rollouts}{tail}",
        f"optimizer steps  at most {rollouts * per_rollout}",
    ]


def _ppo_algorithm(config: PpoConfig) -> list[str]:
    kl, actor = config.algo.kl, config.actor
    control = f"steered to {kl.target} over {kl.horizon} samples" if kl.target else "fixed"
    where = "in the loss" if kl.use_loss else "in the reward"
    pull = f"{kl.init_coef}, {control}, {kl.estimator} {where}" if needs_ref(config) else "none"
    critic = "with a critic" if needs_critic(config) else "without a critic"
    train = config.train
    at_once = train.agent_num_workers * train.agent_episodes_per_worker
    agent = f"samples          by {train.agent_func_path}, up to {at_once} at a time"
    return [
        *([agent] if uses_agent(config) else []),
        f"advantages       {config.algo.advantage.estimator}, {critic}",
        f"loss             {actor.policy_loss_type}, {actor.loss_agg_mode}",
        f"KL               {pull}",
    ]


def _push_line(config: PpoConfig, machine: Machine) -> str:
    backend, why = push_backend(config, machine)
    size = config.push.bucket_bytes / 2**20
    return f"push by {backend}: {why}; buckets of {size:.0f} MiB"


def _offline_batches(config: SftConfig | RmConfig | DpoConfig, machine: Machine) -> list[str]:
    what = "samples" if isinstance(config, SftConfig) else "pairs"
    return [
        f"optimizer step   {config.train.batch_size} {what}",
        f"micro-batches    {_micro(config, machine)}",
    ]


def _offline_steps(config: SftConfig | RmConfig | DpoConfig, counted: Dataset) -> list[str]:
    train = config.train
    lines = [
        _size_line("samples" if isinstance(config, SftConfig) else "pairs", counted),
        f"epochs           {train.max_epochs}",
    ]
    if counted.size is None:
        cap = f", at most {train.max_steps}" if train.max_steps else ""
        return [*lines, f"optimizer steps  samples / {train.batch_size} an epoch{cap}"]
    steps = -(-counted.size // train.batch_size) * train.max_epochs
    return [*lines, f"optimizer steps  at most {min(steps, train.max_steps or steps)}"]


def _files(config: TrainerConfig) -> list[str]:
    return [
        f"run              {config.run.folder}",
        f"final model      {config.ckpt.output_dir}",
    ]


def _obstacles(config: TrainerConfig, machine: Machine, target: Machine) -> list[str]:
    """What keeps this build, on this machine, from running the plan."""
    found = [str(obstacle) for obstacle in (*obstacles(config, target), *in_the_way(config))]
    if target != machine:
        found.insert(0, f"this machine has no GPU, the plan is for {target.num_gpus}")
    return found or ["nothing that is known without loading models or data keeps it from running"]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
