"""Days, money and energy of a training of so many tokens."""

from dataclasses import dataclass
from datetime import date
from os import PathLike
from pathlib import Path

from pydantic import ValidationError

from zsim.bounded_text import bounded_toml
from zsim.config_error import line
from zsim.files.given import read_config
from zsim.mistake import MistakeError, file_fault
from zsim.strategy.config_table import Positive, Table
from zsim.units import UnitError, format_count, parse_duration, parse_tokens

SECONDS_PER_DAY = 86_400
SECONDS_PER_HOUR = 3600
JOULES_PER_KWH = 3_600_000

DRAWN = 0.76
"""Share of the rated power that intensive training draws: measured of nodes of 8 H100 by Newkirk et
al. 2025, "Empirically-Calibrated H100 Node Power Models for Reducing Uncertainty in AI Training
Energy Estimation" (arXiv 2506.14551). Latif et al. 2025 (IEEE Access 13) saw 0.82 at most. Both are
shares of a node's 10.2 kW; that GPUs of every kind draw as much, whatever part of a step they
compute in, is an assumption.
"""


class Prices(Table):
    """A file of prices: whose they are, and of which day.

    Attributes:
        date: when they were asked for.
        currency: what they are in.
        price_per_gpu_hour: by the name of the GPU.
    """

    date: date
    currency: str = "USD"
    price_per_gpu_hour: dict[str, Positive]

    def price(self, gpu: str, where: str) -> "Price":
        """Return the price of a GPU.

        Raises:
            MistakeError: it has none.
        """
        price = self.price_per_gpu_hour.get(gpu)
        if price is None:
            known = ", ".join(self.price_per_gpu_hour) or "none"
            raise MistakeError(f"--prices: {where}: no price of {gpu}; there are {known}")
        return Price(per_gpu_hour=price, currency=self.currency, source=f"{where} of {self.date}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of a GPU for an hour, and where it is from."""

    per_gpu_hour: float
    currency: str = ""
    source: str = "--price"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBudget:
    """What a training takes from its first token to its last, if nothing goes wrong.

    Attributes:
        tokens: that are trained on.
        seconds: steps alone: no evaluation, no checkpoint, no restart.
        gpus: that it runs on.
        price: of one of them.
        gpu_power_w: what one draws at most; None where that is not known.
    """

    tokens: int
    seconds: float
    gpus: int
    price: Price | None = None
    gpu_power_w: int | None = None

    @property
    def days(self) -> float:
        """Days of the training."""
        return self.seconds / SECONDS_PER_DAY

    @property
    def gpu_hours(self) -> float:
        """Hours of all GPUs together."""
        return self.gpus * self.seconds / SECONDS_PER_HOUR

    @property
    def cost(self) -> float | None:
        """Price of these hours."""
        return None if self.price is None else self.gpu_hours * self.price.per_gpu_hour

    @property
    def energy_kwh(self) -> float | None:
        """Energy of the GPUs at the power of their data sheet: they draw no more."""
        if self.gpu_power_w is None:
            return None
        return self.gpus * self.gpu_power_w * self.seconds / JOULES_PER_KWH

    @property
    def expected_kwh(self) -> float | None:
        """Energy of the GPUs at the share of this power that was measured of others."""
        return None if self.energy_kwh is None else DRAWN * self.energy_kwh

    def text(self) -> str:
        """Return all of it in a line."""
        tokens = format_count(self.tokens)
        hours = f"{_days(self.days)} on {self.gpus:,} GPUs, {_count(self.gpu_hours)} GPU hours"
        parts = [f"{tokens} tokens: {hours}"]
        if self.price is not None and self.cost is not None:
            price = f"{self.price.per_gpu_hour:g} an hour ({self.price.source})"
            parts.append(f"{_count(self.cost)} {self.price.currency}".rstrip() + f" at {price}")
        if self.energy_kwh is not None and self.expected_kwh is not None:
            power = f"GPUs alone, {DRAWN:.0%} of {self.gpu_power_w} W each"
            most = f"at most {_count(self.energy_kwh)}"
            parts.append(f"about {_count(self.expected_kwh)} kWh ({power}), {most}")
        return "; ".join(parts)

    def to_dict(self) -> dict[str, object]:
        """Return all of it with units last in the names."""
        return {
            "tokens": self.tokens,
            "days": self.days,
            "gpu_hours": self.gpu_hours,
            "cost": self.cost,
            "currency": None if self.price is None else self.price.currency,
            "price_source": None if self.price is None else self.price.source,
            "energy_kwh_at_most": self.energy_kwh,
            "energy_kwh_expected": self.expected_kwh,
        }


def _days(days: float) -> str:
    return f"{days:,.1f} days" if days >= 1 else f"{days * 24:.1f} hours"


def _count(number: float) -> str:
    return format_count(round(number)) if number >= 100 else f"{number:.3g}"


def price_of(gpu: str, price: float | None, prices: str | PathLike[str] | None) -> Price | None:
    """Return the price of a GPU: as it is given, or from a file; None without both.

    Raises:
        MistakeError: both are given, or the file has none.
    """
    if price is not None and prices is not None:
        raise MistakeError(f"--price: {price:g} stands without --prices")
    if price is not None:
        return Price(per_gpu_hour=price)
    if prices is None:
        return None
    path = Path(prices)
    try:
        found = Prices.model_validate(bounded_toml(read_config(path)))
    except OSError as error:
        raise file_fault(f"--prices: {path}", error) from None
    except ValidationError as error:
        raise MistakeError(
            f"--prices: {path}: {line(error.errors(include_url=False), Prices)}"
        ) from None
    except ValueError as error:
        raise MistakeError(f"--prices: {path}: not TOML: {error}") from None
    return found.price(gpu, str(path))


def tokens_of(text: str | float | None, option: str = "--tokens") -> int | None:
    """Return a number of tokens as it is given: 15e12, "15T".

    Raises:
        MistakeError: it is none.
    """
    if text is None:
        return None
    try:
        return parse_tokens(str(text))
    except UnitError as error:
        raise MistakeError(f"{option}: {error}") from None


def duration_of(text: str | None, option: str) -> int | None:
    """Return the seconds of a duration such as "30 days".

    Raises:
        MistakeError: it is none.
    """
    try:
        return None if text is None else parse_duration(text)
    except UnitError as error:
        raise MistakeError(f"{option}: {error}") from None


def batch_of(text: str | None) -> int | None:
    """Return the tokens of a step; k and M are 2^10 and 2^20, as batches have them.

    Raises:
        MistakeError: it is no number of tokens.
    """
    if text is None:
        return None
    number, unit = text.strip(), 1
    if number[-1:] in {"k", "K", "M"}:
        number, unit = number[:-1], {"M": 2**20}.get(number[-1], 2**10)
    found = tokens_of(number, "--batch")
    return None if found is None else found * unit
