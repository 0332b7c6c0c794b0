"""When the next part is asked for: by a clock and a link of the test's own."""

from __future__ import annotations

import threading

import pytest

from syncline.sync.pace import Pace

MIB = 1 << 20


def is_its_turn(pace: Pace, number: int, nbytes: int = MIB) -> bool:
    """Tell whether the part begins at once; one that does is over at once, too."""

    def begin() -> None:
        with pace.turn(number, nbytes):
            pass

    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    thread.join(0.05)
    return not thread.is_alive()


def test_small_parts_need_not_wait_for_each_other() -> None:
    pace = Pace()
    with pace.turn(0, 1000), pace.turn(1, 1000), pace.turn(2, 1000):
        assert is_its_turn(pace, 3)


@pytest.mark.parametrize(("answer_s", "expected"), [(0.001, False), (0.1, True)])
def test_a_long_way_is_filled_and_a_short_one_is_left_to_the_part_before(
    answer_s: float, expected: bool
) -> None:
    now = [0.0]
    pace = Pace(clock=lambda: now[0])
    with pace.turn(0, 8 * MIB) as came:
        now[0] += answer_s
        came(0)
        now[0] += 0.1
        came(4 * MIB)  # 40 MiB a second; 4 MiB are left
        assert is_its_turn(pace, 1) is expected


def test_a_part_that_fails_lets_the_next_one_begin() -> None:
    pace = Pace()
    with pytest.raises(ValueError, match="lost"), pace.turn(0, 100 * MIB):
        raise ValueError("lost")
    assert is_its_turn(pace, 1)


def test_parts_begin_in_order() -> None:
    pace, begun = Pace(), []

    def begin(number: int) -> None:
        with pace.turn(number, 100 * MIB):
            begun.append(number)

    threads = [threading.Thread(target=begin, args=(number,)) for number in (3, 1, 2, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert begun == [0, 1, 2, 3]


def test_who_waits_for_a_turn_that_never_comes_is_let_go_at_the_end() -> None:
    pace = Pace()
    with pace:
        waiting = threading.Thread(target=lambda: pace.turn(1, MIB).__enter__(), daemon=True)
        waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()
