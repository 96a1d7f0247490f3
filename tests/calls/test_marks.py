"""Marks of tensors last as long as the tensors, and no other tensor inherits one."""

import gc
import weakref

import torch

from fastdp.calls.marks import Marks


def test_a_mark_is_of_one_tensor_and_keeps_it_from_nothing():
    one, two = torch.zeros(3), torch.zeros(3)
    marks = Marks([(one, "first")])
    assert one in marks
    assert two not in marks
    assert (marks[one], marks.get(one), marks.get(two)) == ("first", "first", None)
    marks[one] = "again"
    assert marks[one] == "again"
    marks.pop(one)
    marks.pop(two)
    assert one not in marks
    marks[two] = "second"
    gone = weakref.ref(two)
    del two
    assert gone() is None


def test_a_tensor_in_the_place_of_another_has_no_mark():
    """Python gives the memory of an object to the next one, so that identities come again."""
    marks, taken = Marks(), set()
    for _ in range(1000):
        tensor = torch.zeros(1)
        assert tensor not in marks
        taken.add(id(tensor))
        marks[tensor] = None
        del tensor
    assert len(taken) < 1000, "no identity came again, so that nothing was tried"


def test_a_tensor_that_only_torch_still_holds_keeps_its_mark():
    marks = Marks()
    leaf = torch.zeros(3, requires_grad=True)
    base = leaf * 2
    marks[base] = "base"
    view = base.view(1, 3)
    del base
    gc.collect()
    assert view._base in marks


def test_values_go_with_their_marks_at_once():
    tensor, value = torch.zeros(1), torch.zeros(2)
    marks, gone = Marks([(tensor, value)]), weakref.ref(value)
    del marks, value
    assert gone() is None
