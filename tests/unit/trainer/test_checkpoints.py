"""A run that goes on from a checkpoint ends as one that nobody disturbed."""

import pytest

from quartet.errors import ConfigError, InfraError
from quartet.trainer.ppo_loop import PpoLoop
from tests.unit.trainer.players import Cast, FakeTrainee, inputs, ppo_config


def config(folder, **sections):
    ckpt = {"save_steps": 1, "path": str(folder / "ckpt"), "output_dir": "/exported"}
    ckpt |= sections.pop("ckpt", {})
    return ppo_config(
        **{
            "algo": {"advantage": {"estimator": "gae"}, "kl": {"target": 0.1, "horizon": 100}},
            "train": {"batch_size": 3, "seed": 7, "full_determinism_enable": True},
            "rollout": {"batch_size": 2, "n_samples_per_prompt": 2, "max_new_tokens": 8},
            "ckpt": ckpt,
        }
        | sections
    )


def new_cast():
    cast = Cast(critic=FakeTrainee(head="value"))
    cast.reference.shift = 0.3
    return cast


async def play(cast, settings, folder):
    run = cast.run(settings, folder)
    try:
        await PpoLoop(settings, run, inputs(8), cast.players).run()
        return await run.ledger.counts()
    finally:
        await run.ledger.close()
        run.progress.close()


def rows(cast):
    return [
        (step, {k: v for k, v in metrics.items() if not k.startswith("timing/")})
        for _, step, metrics in cast.sink.rows
    ]


async def test_going_on_gives_what_an_undisturbed_run_gives(tmp_path):
    whole = new_cast()
    await play(whole, config(tmp_path / "whole"), tmp_path / "whole")

    killed, folder = new_cast(), tmp_path / "killed"
    score = killed.judge.score

    async def dying(request):
        # In the middle of step 3 of 4: 3 x 4 samples are asked for.
        if sum(len(r.items) for r in killed.judge.log) >= 8:
            raise InfraError("the machine is gone")
        return await score(request)

    killed.judge.score = dying
    with pytest.raises(BaseExceptionGroup):
        await play(killed, config(folder), folder)
    assert [step for step, _ in rows(killed)] == [1, 2]

    resumed = new_cast()
    counts = await play(resumed, config(folder, ckpt={"load_enable": True}), folder)
    assert rows(killed) + rows(resumed) == rows(whole)
    assert counts == {"trained": 16}
    assert resumed.sink.rewound == 2
    assert resumed.policy.steps == whole.policy.steps
    assert resumed.policy.of("start") == []
    # A service that outlived the killed trainer sees no request id twice.
    ids = [e[1].request_id for c in (killed, resumed) for e in c.policy.of("train")]
    assert len(set(ids)) == len(ids)


async def test_resume_takes_the_step_that_both_learners_have(tmp_path):
    cast = new_cast()
    settings = config(tmp_path)
    save = cast.critic.save_checkpoint

    async def failing(**call):
        if call["tag"] == "global_step3":
            raise InfraError("the disk is full")
        return await save(**call)

    cast.critic.save_checkpoint = failing
    with pytest.raises(InfraError):
        await play(cast, settings, tmp_path)
    resumed = new_cast()
    await play(resumed, config(tmp_path, ckpt={"load_enable": True, "save_steps": -1}), tmp_path)
    assert resumed.policy.of("load")[0][2] == resumed.critic.of("load")[0][2] == "global_step2"
    assert [step for step, _ in rows(resumed)] == [3, 4]


async def test_old_checkpoints_go_when_the_new_one_is_whole(tmp_path):
    cast = new_cast()
    await play(cast, config(tmp_path, ckpt={"max_num": 2, "save_hf": True}), tmp_path)
    for role in ("_actor", "_critic"):
        found = sorted(p.name for p in (tmp_path / "ckpt" / role).glob("global_step*"))
        assert found == ["global_step3", "global_step4"]
    exported = [e[1] for e in cast.policy.of("export")]
    assert exported == [f"{tmp_path}/ckpt/global_step{i}_hf" for i in (1, 2, 3, 4)] + ["/exported"]


async def test_a_failed_save_costs_no_older_checkpoint(tmp_path):
    cast = new_cast()
    save = cast.critic.save_checkpoint

    async def failing(**call):
        if call["tag"] == "global_step3":
            raise InfraError("the disk is full")
        return await save(**call)

    cast.critic.save_checkpoint = failing
    with pytest.raises(InfraError):
        await play(cast, config(tmp_path, ckpt={"max_num": 1}), tmp_path)
    for role in ("_actor", "_critic"):
        assert (tmp_path / "ckpt" / role / "global_step2").is_dir()


async def test_size_limit_keeps_at_least_the_newest(tmp_path):
    cast = new_cast()
    await play(cast, config(tmp_path, ckpt={"max_mem": 1e-12}), tmp_path)
    assert [p.name for p in (tmp_path / "ckpt/_actor").glob("global_step*")] == ["global_step4"]


async def test_each_nth_step_and_not_at_all(tmp_path):
    cast = new_cast()
    await play(cast, config(tmp_path, ckpt={"save_steps": 3}), tmp_path)
    assert [e[2] for e in cast.policy.of("checkpoint")] == ["global_step3"]
    cast, other = new_cast(), tmp_path / "other"
    await play(cast, config(other, ckpt={"save_steps": -1}), other)
    assert cast.policy.of("checkpoint") == []


async def test_only_hf_copies_when_asked(tmp_path):
    cast = new_cast()
    await play(cast, config(tmp_path, ckpt={"save_hf": True, "disable_ds": True}), tmp_path)
    assert cast.policy.of("checkpoint") == []
    assert len(cast.policy.of("export")) == 5


async def test_no_checkpoint_is_an_error_and_no_fresh_start(tmp_path):
    with pytest.raises(ConfigError, match="there is no checkpoint in") as caught:
        await play(new_cast(), config(tmp_path, ckpt={"load_enable": True}), tmp_path)
    assert caught.value.info.field == "ckpt.load_enable"


async def test_checkpoint_that_counts_otherwise_is_refused(tmp_path):
    await play(new_cast(), config(tmp_path), tmp_path)
    changed = config(
        tmp_path,
        ckpt={"load_enable": True},
        train={"batch_size": 4, "seed": 7, "full_determinism_enable": True},
    )
    with pytest.raises(ConfigError, match=r"made with train.batch_size 3, now it is 4"):
        await play(new_cast(), changed, tmp_path)


async def test_what_a_run_began_with_holds_and_other_flags_are_said(tmp_path):
    schedule = {"num_episodes": 1, "batch_size": 3, "seed": 7, "full_determinism_enable": True}
    shorter = config(tmp_path, train=schedule | {"max_steps": 2})
    await play(new_cast(), shorter, tmp_path)
    resumed = new_cast()
    changed = config(
        tmp_path,
        ckpt={"load_enable": True},
        train=schedule,
        actor={"adam": {"lr": 5e-4, "betas": [0.9, 0.95]}},
    )
    said = await heard(resumed, changed, tmp_path)
    assert "actor.adam.lr: 0.0005 now, but the run goes on with 1e-06, as it began" in said
    assert "steps of actor.lr_scheduler: 8 now, but the run goes on with 4, as it began" in said
    assert "steps of critic.lr_scheduler: 8 now" in said
    assert "betas" not in said
    # The checkpoints that follow are still of the run as it began.
    assert "goes on with 1e-06" in await heard(new_cast(), changed, tmp_path)


async def heard(cast, settings, folder):
    """All that is said to the user of a run."""
    run = cast.run(settings, folder)
    said = []
    run.progress.say = said.append
    try:
        await PpoLoop(settings, run, inputs(8), cast.players).run()
    finally:
        await run.ledger.close()
        run.progress.close()
    return "\n".join(said)
