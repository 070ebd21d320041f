"""Which segments are recomputed: as few as fit, found by trying all, and the rule of the square root."""

import itertools
import random

import pytest

from mpitrain.errors import ConfigError
from mpitrain.memory.recompute import MIB, Segment, best_checkpoints, choose, peak

BLOCKS = [Segment(f"blocks.{number}", 100, 10) for number in range(6)]


def by_hand(segments, chosen, in_flight):
    """Walk forward through all micro-batches and back through one, and note what waits after each move."""
    kept = [s.recomputed if number in chosen else s.whole for number, s in enumerate(segments)]
    waiting, most = (in_flight - 1) * sum(kept), 0
    for each in kept:
        waiting += each
        most = max(most, waiting)
    for number in reversed(range(len(segments))):
        most = max(most, waiting - kept[number] + segments[number].whole)
        waiting -= kept[number]
    return max(most, waiting)


def some_segments(generator, most):
    for number in range(generator.randint(1, most)):
        whole = generator.randint(0, 9)
        yield Segment(str(number), whole, None if generator.random() < 0.2 else generator.randint(0, whole))


def test_the_fewest_that_fit_are_those_that_trying_all_finds():
    generator, refused = random.Random(1), 0
    for _ in range(400):
        segments, in_flight = list(some_segments(generator, 6)), generator.randint(1, 3)
        budget = generator.randint(0, 30 * in_flight)
        able = [number for number, segment in enumerate(segments) if segment.recomputed is not None]
        tried = (
            min((by_hand(segments, chosen, in_flight), chosen) for chosen in itertools.combinations(able, count))
            for count in range(len(able) + 1)
        )
        fitting = next((chosen for most, chosen in tried if most <= budget), None)
        if fitting is None:
            refused += 1
            with pytest.raises(ConfigError):
                choose(segments, budget, in_flight)
        else:
            chosen = choose(segments, budget, in_flight)
            assert len(chosen) == len(fitting)
            assert peak(segments, chosen, in_flight) == by_hand(segments, fitting, in_flight) <= budget
    assert 50 < refused < 300


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_the_peak_is_that_of_the_walk(in_flight):
    generator = random.Random(2)
    for _ in range(100):
        segments = list(some_segments(generator, 8))
        able = [number for number, segment in enumerate(segments) if segment.recomputed is not None]
        chosen = set(generator.sample(able, generator.randint(0, len(able))))
        assert peak(segments, chosen, in_flight) == by_hand(segments, chosen, in_flight)


@pytest.mark.parametrize(
    ("budget", "chosen"), [(600, ()), (599, (0,)), (510, (0,)), (420, (0, 1)), (239, range(5)), (150, range(5))]
)
def test_of_equal_blocks_the_first_are_recomputed(budget, chosen):
    """The last ones would be whole again while all others still wait."""
    assert choose(BLOCKS, budget) == tuple(chosen)
    with pytest.raises(ConfigError):
        choose(BLOCKS, 149)


def test_a_head_that_cannot_be_recomputed_waits_whole():
    segments = [*BLOCKS, Segment("head", 400)]
    assert choose(segments, 1000) == ()
    assert choose(segments, 999) == (0,)
    assert choose(segments, 460) == tuple(range(6))
    with pytest.raises(ConfigError):
        choose(segments, 459)


def test_what_does_not_fit_is_said_with_its_numbers():
    segments = [Segment(f"blocks.{n}", 40 * MIB, 4 * MIB) for n in range(4)]
    with pytest.raises(ConfigError) as caught:
        choose(segments, 60 * MIB, in_flight=3)
    text = str(caught.value)
    assert text.startswith("3 micro-batches in flight need 84.00 MiB for activations with 4 of 4 segments recomputed")
    assert "more than the budget of 60.00 MiB (480.00 MiB with none)" in text
    assert "blocks.0, takes 40.00 MiB" in text


def test_a_long_model_of_equal_blocks_is_quick():
    segments = [Segment(f"blocks.{n}", 100, 10) for n in range(200)]
    assert choose(segments, 10 * 199 + 100) == tuple(range(199))
    assert choose([], 0) == ()


def test_the_best_number_of_segments_goes_with_the_square_root():
    """T19.3."""
    assert best_checkpoints(64, 1, 1) == (8, 16)
    assert best_checkpoints(1, 5, 1) == (1, 6)
    for layers, inner, inputs in itertools.product((16, 100, 400), (1, 4, 25), (1, 9)):
        count, memory = best_checkpoints(layers, inner, inputs)
        ideal = (layers * inner / inputs) ** 0.5
        assert count <= layers
        if ideal <= layers:
            assert ideal / 1.5 <= count <= ideal * 1.5
            assert memory >= 2 * (layers * inner * inputs) ** 0.5  # the least over real numbers
    with pytest.raises(ConfigError):
        best_checkpoints(0, 1, 1)
