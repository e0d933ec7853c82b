"""Lists and dicts of many entries are what they are in memory, wherever they are kept."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_cli.runs.storage import spilled as spilling
from rlvr_cli.runs.storage.spilled import SpilledList, SpillingDict, spilled

values = st.one_of(st.integers(0, 2**200), st.just(2**100_000 - 1))
keys = st.one_of(st.text(max_size=3), st.tuples(st.text(max_size=2), st.integers(0, 3)))


@settings(max_examples=40)
@given(steps=st.lists(st.tuples(st.booleans(), keys, values), max_size=20), most=st.integers(0, 5))
def test_a_spilling_dict_is_a_dict(steps, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spilling, "IN_MEMORY", most)
        ours, plain = SpillingDict(), {}
        for adds, key, value in steps:
            if adds:
                ours[key] = plain[key] = value
            else:
                assert ours.pop(key, None) == plain.pop(key, None)
            assert (len(ours), ours.get(key), key in ours) == (len(plain), plain.get(key), key in plain)
        assert dict(ours.items()) == plain
        ours["text"] = "of a place"
        assert ours["text"] == "of a place"


@dataclass(frozen=True, slots=True)
class Record:
    text: str
    more: str | None = None


records = st.builds(Record, st.text(max_size=3), st.one_of(st.none(), st.text(max_size=3)))


@settings(max_examples=40)
@given(items=st.lists(records, max_size=12), most=st.integers(0, 8), cut=st.slices(12))
def test_a_spilled_list_is_a_list(items, most, cut):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spilling, "IN_MEMORY", most)
        kept = spilled(iter(items), Record)
    assert isinstance(kept, SpilledList) == (len(items) > most)
    assert (list(kept), len(kept), kept[cut]) == (items, len(items), items[cut])
    for index in (*range(len(items)), *range(-len(items), 0)):
        assert kept[index] == items[index]
    with pytest.raises(IndexError):
        kept[len(items)]
