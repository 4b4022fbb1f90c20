"""Certificates: against exact enumeration with fractions, and by the property that they promise."""

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from export.cascade.certificate import betting_p, binomial_p, fixed_sequence, most_errors, units_needed, upper_limit


def exact_tail(errors: int, n: int, bound: Fraction) -> Fraction:
    """P(Bin(n, bound) <= errors), exactly."""
    return sum((math.comb(n, k) * bound**k * (1 - bound) ** (n - k) for k in range(errors + 1)), Fraction(0))


@pytest.mark.parametrize("bound", [Fraction(1, 200), Fraction(1, 100), Fraction(1, 50), Fraction(1, 3)])
@pytest.mark.parametrize("n", [1, 7, 60, 300])
def test_the_p_value_of_counts_is_exact(bound: Fraction, n: int) -> None:
    for errors in {0, 1, 2, n // 3, n - 1, n}:
        if errors <= n:
            assert binomial_p(errors, n, float(bound)) == pytest.approx(float(exact_tail(errors, n, bound)), rel=1e-10)


def test_rows_that_are_needed_without_an_error() -> None:
    assert [units_needed(bound, 0.05) for bound in (0.005, 0.01, 0.02)] == [598, 299, 149]
    assert [units_needed(bound, 0.1) for bound in (0.005, 0.01, 0.02)] == [460, 230, 114]


@pytest.mark.parametrize("errors", [0, 1, 4])
@pytest.mark.parametrize(("bound", "alpha"), [(Fraction(3, 10), 0.05), (Fraction(1, 10), 0.2), (Fraction(1, 50), 0.05)])
def test_rows_that_are_needed_are_the_fewest(errors: int, bound: Fraction, alpha: float) -> None:
    needed = units_needed(float(bound), alpha, errors)
    assert exact_tail(errors, needed, bound) <= alpha < exact_tail(errors, needed - 1, bound)


@pytest.mark.parametrize(("n", "bound", "alpha"), [(50, Fraction(1, 5), 0.05), (598, Fraction(1, 200), 0.05), (300, Fraction(1, 50), 0.1)])
def test_most_errors_are_the_last_that_pass(n: int, bound: Fraction, alpha: float) -> None:
    most = most_errors(n, float(bound), alpha)
    assert most is not None
    assert exact_tail(most, n, bound) <= alpha < exact_tail(most + 1, n, bound)


def test_one_row_less_than_is_needed_allows_no_certificate() -> None:
    assert most_errors(598, 0.005, 0.05) == 0
    assert most_errors(597, 0.005, 0.05) is None


@pytest.mark.parametrize("n", [1, 5, 20])
@pytest.mark.parametrize("alpha", [0.05, 0.3])
def test_the_upper_limit_covers_a_share_often_enough_and_no_more_than_it_has_to(n: int, alpha: float) -> None:
    limits = [upper_limit(k, n, alpha) for k in range(n + 1)]
    assert limits == sorted(limits)
    assert limits[-1] == 1.0
    for share in (Fraction(number, 40) for number in range(40)):
        missed = sum((math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(n + 1) if limits[k] < share), Fraction(0))
        assert missed <= Fraction(alpha) + Fraction(1, 10**9)
    for k in range(n):  # at the limit itself so few are exactly as unlikely as alpha
        assert float(exact_tail(k, n, Fraction(limits[k]))) == pytest.approx(alpha, rel=1e-6)


def naive_capital(losses: list[float], bound: float, low: float, high: float, alpha: float) -> list[float]:
    """The capital after each bet, with every step written out."""
    capital, found, n = 1.0, [], len(losses)
    squares, total = 0.25, 0.5
    variance = 0.25
    limit = (bound - low) / (high - low)
    for number, loss in enumerate(losses, 1):
        scaled = (loss - low) / (high - low)
        bet = min(math.sqrt(2 * math.log(1 / alpha) / (n * variance)), 0.75 / (1 - limit))
        capital *= 1 + bet * (limit - scaled)
        found.append(capital)
        total += scaled
        squares += (scaled - total / (number + 1)) ** 2
        variance = squares / (number + 1)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_the_capital_is_that_of_the_written_out_bets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    losses = rng.choice([-1.0, 0.0, 0.5, 1.0], 200, p=[0.1, 0.7, 0.1, 0.1])
    capital = naive_capital(losses.tolist(), 0.3, -1.0, 1.0, 0.05)
    assert betting_p(losses, 0.3, -1.0, 1.0, 0.05) == pytest.approx(min(1.0, 1 / max(capital)), rel=1e-9)


@pytest.mark.parametrize(("alpha", "bound"), [(0.05, 0.7), (0.2, 0.4), (0.5, 0.1)])
@pytest.mark.parametrize("more", [0.0, 0.1])
def test_bets_on_losses_0_and_1_are_wrong_seldom_enough(alpha: float, bound: float, more: float) -> None:
    """All 2^9 sequences of losses whose mean is the bound, or above it, with their probabilities."""
    n, share = 9, bound + more
    wrong = math.fsum(
        share ** sum(losses) * (1 - share) ** (n - sum(losses))
        for losses in product((0, 1), repeat=n)
        if betting_p(np.array(losses, np.float64), bound, 0.0, 1.0, alpha) <= alpha
    )
    assert wrong <= alpha


@pytest.mark.parametrize(("alpha", "down", "up"), [(0.1, 0.1, 0.2), (0.4, 0.0, 0.4), (0.4, 0.3, 0.6)])
def test_bets_on_drops_are_wrong_seldom_enough(alpha: float, down: float, up: float) -> None:
    """All 3^6 sequences of drops -1, 0 and 1 whose mean is the bound."""
    p = {-1.0: down, 0.0: 1 - down - up, 1.0: up}
    wrong = math.fsum(
        math.prod(p[loss] for loss in losses)
        for losses in product(p, repeat=6)
        if betting_p(np.array(losses), up - down, -1.0, 1.0, alpha) <= alpha
    )
    assert wrong <= alpha


def test_no_bet_risks_more_than_the_capital_allows() -> None:
    """Rare losses make bets grow up to their limit, above which one loss would take more than there is."""
    losses = np.zeros(400)
    losses[[200, 300]] = 1.0
    capital = naive_capital(losses.tolist(), 0.05, 0.0, 1.0, 0.05)
    assert capital[200] == pytest.approx(capital[199] * (1 - 0.75), rel=1e-9)
    assert betting_p(losses, 0.05, 0.0, 1.0, 0.05) == pytest.approx(1 / max(capital), rel=1e-9)


def test_bets_certify_a_rare_drop_with_few_rows() -> None:
    rng = np.random.default_rng(0)
    losses = rng.choice([-1.0, 0.0, 1.0], 3000, p=[0.004, 0.991, 0.005])
    assert betting_p(losses, 0.01, -1.0, 1.0, 0.05) <= 0.05
    assert betting_p(losses, 0.001, -1.0, 1.0, 0.05) > 0.05


def test_bounds_that_are_none() -> None:
    losses = np.zeros(100)
    assert betting_p(losses, 1.0, 0.0, 1.0, 0.05) == 0.0
    assert betting_p(losses, 0.0, 0.0, 1.0, 0.05) == 1.0
    assert betting_p(losses[:0], 0.5, 0.0, 1.0, 0.05) == 1.0


@pytest.mark.parametrize(
    ("p_values", "chosen"),
    [
        ([0.01, 0.02, 0.9, 0.01], 1),
        ([0.9, 0.01], None),
        ([0.05], 0),
        ([0.01, math.nan, 0.01], 0),
        ([], None),
    ],
)
def test_tests_stop_at_the_first_failure(p_values: list[float], chosen: int | None) -> None:
    assert fixed_sequence(p_values, 0.05) == chosen


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_a_point_above_the_bound_is_chosen_seldom_enough(alpha: float) -> None:
    """All draws of 9 rows from three kinds: kept by no point, by the last two, by the last; with exact probabilities.

    A kept row is answered otherwise, so that the risks of the points are 0, 0.3 and 0.5 against the bound 0.3 + 1e-9 or less.
    """
    n, shares = 9, (Fraction(5, 10), Fraction(3, 10), Fraction(2, 10))
    for bound in (Fraction(29, 100), Fraction(45, 100)):
        risks = (Fraction(0), shares[1], shares[1] + shares[2])
        wrong = Fraction(0)
        for second in range(n + 1):
            for third in range(n + 1 - second):
                counts = (n - second - third, second, third)
                errors = (0, second, second + third)
                chosen = fixed_sequence([binomial_p(k, n, float(bound)) for k in errors], alpha)
                if chosen is not None and risks[chosen] > bound:
                    ways = math.factorial(n) // math.prod(math.factorial(count) for count in counts)
                    wrong += ways * math.prod((share**count for share, count in zip(shares, counts, strict=True)), start=Fraction(1))
        assert wrong <= Fraction(alpha)
