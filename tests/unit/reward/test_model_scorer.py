"""The reward model scorer, against transformers' own forward pass."""

import dataclasses
import json
import shutil

import pytest
import torch
from quartet_reward.batcher import Batcher
from quartet_reward.scorers.model import ModelScorer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from quartet.config.ds import HeadLoadConfig
from quartet.data.tokenizer import fingerprint, load_tokenizer
from quartet.errors import ConfigError, StateError
from quartet.obs.metrics import CUT_INPUTS
from quartet.types import Failure, ScoreItem

FP32 = HeadLoadConfig(param_dtype="fp32")
TEXTS = ["The cat sat on the mat.", "It was a good day, a happy day.", "no", "2 + 2 = 4" * 5]


@pytest.fixture(scope="module")
def tokenizer(tiny_reward_model_dir):
    return load_tokenizer(tiny_reward_model_dir)


@pytest.fixture(scope="module")
def expected(tiny_reward_model_dir, tokenizer):
    """Reward of token ids, one sequence at a time, without any batching."""
    model = AutoModelForSequenceClassification.from_pretrained(tiny_reward_model_dir, num_labels=1)

    def reward(ids):
        with torch.no_grad():
            return float(model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1]))

    return reward


@pytest.fixture
async def start():
    """Start a scorer; returns `score(items, fingerprint)`, its traits and itself."""
    scorers = []

    async def start(folder, config=FP32, **options):
        scorer = ModelScorer(str(folder), config, **options)
        scorers.append(scorer)
        traits = await scorer.start()
        batcher = Batcher(
            scorer.score, max_items=traits.max_batch_items, max_cost=traits.max_batch_cost
        )

        async def score(items, tokenizer_fingerprint=""):
            prepared = await scorer.prepare(items, tokenizer_fingerprint)
            return await batcher.submit(prepared)

        return score, traits, scorer

    yield start
    for scorer in scorers:
        await scorer.stop()


@pytest.fixture
def edited(tiny_reward_model_dir, tmp_path):
    """A copy of the model with other config values, or other names of tensors."""

    def edit(rename=lambda name: name, **config):
        folder = tmp_path / "edited"
        shutil.copytree(tiny_reward_model_dir, folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        weights = load_file(folder / "model.safetensors")
        save_file(
            {rename(name): tensor for name, tensor in weights.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        return folder

    return edit


def items_of(texts, tokenizer=None):
    ids = [tuple(tokenizer(text)["input_ids"]) if tokenizer else () for text in texts]
    return [
        ScoreItem(sample_id=f"s{i}", prompt="", query=text, token_ids=ids[i])
        for i, text in enumerate(texts)
    ]


def numbers(outcomes):
    return [outcome.reward for outcome in outcomes]


async def test_the_policys_tokens_are_read_as_they_are(
    start, tiny_reward_model_dir, tokenizer, expected
):
    score, traits, _ = await start(tiny_reward_model_dir)
    items = items_of(TEXTS, tokenizer)
    outcomes = await score(items, fingerprint(tiny_reward_model_dir))
    wanted = [expected(item.token_ids) for item in items]
    assert numbers(outcomes) == pytest.approx(wanted, abs=1e-5)
    assert len(set(wanted)) == len(wanted)
    assert traits.tokenizer_fingerprint == fingerprint(tiny_reward_model_dir)
    assert traits.digest
    assert traits.max_sequence_length == 512  # the model's own, below data.max_len


async def test_text_ends_in_one_end_token(start, tiny_reward_model_dir, tokenizer, expected):
    score, _, _ = await start(tiny_reward_model_dir)
    eos, pad = tokenizer.eos_token, tokenizer.pad_token
    wanted = expected([*tokenizer("a good day")["input_ids"], tokenizer.eos_token_id])
    forms = ["a good day", f"a good day{eos}", f"a good day{eos}{pad}{pad}", f"{pad}a good day"]
    assert numbers(await score(items_of(forms))) == pytest.approx([wanted] * 4, abs=1e-5)


async def test_tokens_of_another_tokenizer_are_not_read(
    start, tiny_reward_model_dir, tokenizer, expected
):
    score, _, _ = await start(tiny_reward_model_dir)
    item = dataclasses.replace(items_of(["a good day"])[0], token_ids=(5, 6, 7))
    wanted = expected([*tokenizer("a good day")["input_ids"], tokenizer.eos_token_id])
    assert numbers(await score([item], "of another tokenizer")) == pytest.approx([wanted], abs=1e-5)


async def test_the_cut_is_on_the_right_and_counted(
    start, tiny_reward_model_dir, tokenizer, expected
):
    before = CUT_INPUTS._value.get()
    score, traits, _ = await start(tiny_reward_model_dir, max_len=4)
    [item] = items_of(["It was a good day, a happy day."], tokenizer)
    outcomes = await score([item], traits.tokenizer_fingerprint)
    assert numbers(outcomes) == pytest.approx([expected(item.token_ids[:4])], abs=1e-5)
    assert CUT_INPUTS._value.get() == before + 1


async def test_the_batch_does_not_change_the_reward(start, tiny_reward_model_dir, tokenizer):
    items = items_of(TEXTS * 3, tokenizer)
    print_ = fingerprint(tiny_reward_model_dir)
    items = [dataclasses.replace(item, sample_id=f"i{i}") for i, item in enumerate(items)]
    together, _, _ = await start(tiny_reward_model_dir)
    one_by_one, _, _ = await start(tiny_reward_model_dir, batch_size=1)
    small, _, _ = await start(tiny_reward_model_dir, max_batch_tokens=20)
    first = numbers(await together(items, print_))
    assert numbers(await one_by_one(items, print_)) == pytest.approx(first, abs=1e-5)
    assert numbers(await small(items, print_)) == pytest.approx(first, abs=1e-5)


async def test_a_head_of_another_name(start, edited, tokenizer, expected):
    folder = edited(
        lambda name: name.replace("score.", "value_head."), value_head_prefix="value_head"
    )
    score, traits, _ = await start(folder)
    items = items_of(TEXTS, tokenizer)
    outcomes = await score(items, traits.tokenizer_fingerprint)
    assert numbers(outcomes) == pytest.approx([expected(i.token_ids) for i in items], abs=1e-5)


async def test_the_flag_names_the_head_when_the_config_does_not(start, edited):
    folder = edited(lambda name: name.replace("score.", "v."))
    with pytest.raises(ConfigError, match=r"no reward model with a head 'score'.*score\.weight"):
        await start(folder)
    await start(folder, HeadLoadConfig(param_dtype="fp32", value_head_prefix="v"))


async def test_normalisation_by_mean_and_std_of_the_config(start, edited, tokenizer, expected):
    score, traits, _ = await start(edited(mean=0.5, std=2.0), normalize=True)
    assert traits.normalizes
    [item] = items_of(["a good day"], tokenizer)
    outcomes = await score([item], traits.tokenizer_fingerprint)
    wanted = (expected(item.token_ids) - 0.5) / 2.0
    assert numbers(outcomes) == pytest.approx([wanted], abs=1e-5)


@pytest.mark.parametrize("config", [{}, {"mean": 0.5}, {"mean": 0.5, "std": 0.0}])
async def test_normalisation_without_its_numbers_is_refused(start, edited, config):
    with pytest.raises(ConfigError, match=r"reward\.normalize_enable needs mean and std"):
        await start(edited(**config), normalize=True)


async def test_a_causal_model_is_no_reward_model(start, tiny_model_dir):
    with pytest.raises(ConfigError, match="is no reward model"):
        await start(tiny_model_dir)


async def test_a_missing_model(start, tmp_path):
    with pytest.raises(ConfigError, match="nowhere") as caught:
        await start(tmp_path / "nowhere")
    assert "\n" not in str(caught.value)


async def test_a_token_outside_the_vocabulary_fails_alone(start, tiny_reward_model_dir):
    _, traits, scorer = await start(tiny_reward_model_dir)
    good, bad = items_of(["a", "b"])
    bad = dataclasses.replace(bad, token_ids=(3, 99_999))
    prepared = await scorer.prepare([good, bad], traits.tokenizer_fingerprint)
    assert isinstance(prepared[1], Failure)
    assert prepared[1].reason == "TOKEN_OUT_OF_RANGE"
    [reward] = await scorer.score([prepared[0]])
    assert reward.reward == reward.score


async def test_a_model_that_says_nan_is_a_failure(start, edited, tiny_reward_model_dir):
    folder = edited()
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"] = torch.full_like(weights["score.weight"], float("nan"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    score, _, _ = await start(folder)
    [outcome] = await score(items_of(["a"]))
    assert (outcome.error_class, outcome.reason) == ("DATA", "NOT_FINITE")


async def test_sleep_refuses_and_wake_gives_the_same_numbers(start, tiny_reward_model_dir):
    score, _, scorer = await start(tiny_reward_model_dir)
    before = await score(items_of(TEXTS))
    await scorer.sleep()
    with pytest.raises(StateError, match="asleep"):
        await scorer.score(await scorer.prepare(items_of(["a"]), ""))
    await scorer.wake()
    assert await score(items_of(TEXTS)) == before


async def test_offload_gives_the_same_numbers(start, tiny_reward_model_dir):
    plain, _, _ = await start(tiny_reward_model_dir)
    offloaded, _, _ = await start(tiny_reward_model_dir, offload=True)
    assert await plain(items_of(TEXTS)) == await offloaded(items_of(TEXTS))
