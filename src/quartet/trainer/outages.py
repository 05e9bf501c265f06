"""What a user can do about a service at an address that is gone in the middle of a run."""

from __future__ import annotations

from quartet.config import TrainerConfig


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
