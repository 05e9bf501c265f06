"""Batches for the learner: every sequence in them has a name of its own."""

import numpy as np

from quartet.data.samples import PreferencePair, TokenSample, pair_batch, token_batch


def sample(name: str, *token_ids: int) -> TokenSample:
    mask = np.array([i > 0 for i in range(len(token_ids))])
    return TokenSample(sample_id=name, token_ids=np.array(token_ids, np.int32), loss_mask=mask)


def test_rows_that_repeat_have_names_of_their_own():
    batch = token_batch([sample("a", 1, 2), sample("b", 3, 4), sample("a", 1, 2)])
    assert batch.sequences.sample_ids == ("a", "b", "a#2")
    assert batch.sequences.token_ids.tolist() == [1, 2, 3, 4, 1, 2]


def test_one_good_answer_may_stand_beside_several_bad_ones():
    good = sample("good", 1, 2)
    pairs = [
        PreferencePair(pair_id=str(i), chosen=good, rejected=sample(f"bad{i}", 1, 3), margin=0.5)
        for i in range(3)
    ]
    batch = pair_batch(pairs)
    assert len(set(batch.sequences.sample_ids)) == 6
    assert batch.margins is not None
    assert batch.margins.tolist() == [0.5] * 3
