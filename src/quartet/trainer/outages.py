"""What is said of services at given addresses: one that is gone, and those that outlive the run."""

from __future__ import annotations

from quartet.config import TrainerConfig
from quartet.config.machine import this_machine
from quartet.config.placement import places


def way_on(config: TrainerConfig) -> str:
    """How to go on when a run has ended for lack of a service.

    Example:
        >>> way_on(SftConfig(ckpt=CkptConfig(save_steps=10)))
        'start it again and resume with --ckpt.load_enable'
    """
    ckpt = config.ckpt
    if ckpt.save_steps > 0 and not ckpt.disable_ds:
        return "start it again and resume with --ckpt.load_enable"
    return (
        "start it again and begin anew; with --ckpt.save_steps N a run can be resumed by "
        "--ckpt.load_enable"
    )


def longer_wait(flag: str, seconds: float) -> str:
    """Which flag sets how long an outage may last.

    Example:
        >>> longer_wait("launch.connect_timeout", 60.0)
        '--launch.connect_timeout, now 60, sets how long it may be away'
    """
    return f"--{flag}, now {seconds:g}, sets how long it may be away"


def what_is_left(config: TrainerConfig) -> str:
    """Which services outlive a run that was interrupted.

    Example:
        >>> what_is_left(SftConfig(learner=LearnerConfig(address="127.0.0.1:7004")))
        'left running, as they have an address: learner at 127.0.0.1:7004'
    """
    roles: dict[str, list[str]] = {}
    started_here = False
    for place in places(config, this_machine()):
        if place.address:
            roles.setdefault(place.role, []).append(place.address)
        else:
            started_here = True
    given = ", ".join(f"{role} at {', '.join(found)}" for role, found in roles.items())
    parts = ["no service was left behind"] if started_here or not given else []
    if given:
        parts.append(f"left running, as they have an address: {given}")
    return "; ".join(parts)
