"""Days, cost and energy of a whole training."""

from dataclasses import dataclass
from datetime import date
from os import PathLike
from pathlib import Path

from pydantic import ValidationError

from zsim.api.goodput_answer import Goodput
from zsim.bounded_text import bounded_toml
from zsim.config_error import line
from zsim.files.input_file import read_config
from zsim.mistake import MistakeError, file_fault
from zsim.strategy.config_table import Positive, Table
from zsim.units import UnitError, format_count, parse_duration, parse_tokens

SECONDS_PER_DAY = 86_400
DAYS_PER_YEAR = 365.25
SECONDS_PER_HOUR = 3600
JOULES_PER_KWH = 3_600_000

DRAWN = 0.76
"""Fraction of the rated power that intensive training draws.

Newkirk et al. 2025 measured it on nodes of 8 H100: "Empirically-Calibrated H100 Node Power Models
for Reducing Uncertainty in AI Training Energy Estimation" (arXiv 2506.14551). Latif et al. 2025
(IEEE Access 13) saw at most 0.82. Both are fractions of a node's 10.2 kW. zsim assumes the same
fraction for all GPUs and for all parts of a step.
"""


class Prices(Table):
    """A file of GPU prices.

    Attributes:
        date: date of the prices.
        currency: currency of the prices.
        price_per_gpu_hour: price of a GPU hour by name of the GPU.
    """

    date: date
    currency: str = "USD"
    price_per_gpu_hour: dict[str, Positive]

    def price(self, gpu: str, where: str) -> "Price":
        """Return the price of a GPU; `where` is the name of the file.

        Raises:
            MistakeError: the file has no price of this GPU.
        """
        price = self.price_per_gpu_hour.get(gpu)
        if price is None:
            known = ", ".join(self.price_per_gpu_hour) or "none"
            raise MistakeError(f"--prices: {where}: no price of {gpu}; there are {known}")
        return Price(per_gpu_hour=price, currency=self.currency, source=f"{where} of {self.date}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of a GPU hour, and its source."""

    per_gpu_hour: float
    currency: str = ""
    source: str = "--price"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBudget:
    """Time, cost and energy of a whole training.

    Attributes:
        tokens: tokens of the training.
        seconds: duration of the steps alone: no evaluation, no checkpoint, no restart.
        gpus: number of GPUs that train.
        price: price of a GPU; None if unknown.
        gpu_power_w: power limit of a GPU in watts; None if unknown.
        goodput: failures, checkpoints and spare nodes; None to count the steps alone.
    """

    tokens: int
    seconds: float
    gpus: int
    price: Price | None = None
    gpu_power_w: int | None = None
    goodput: Goodput | None = None

    @property
    def passing_s(self) -> float:
        """Seconds that pass, with failures, checkpoints and restarts."""
        return self.seconds if self.goodput is None else self.goodput.passing_s(self.seconds)

    @property
    def days(self) -> float:
        """Days that pass."""
        return self.passing_s / SECONDS_PER_DAY

    @property
    def spare_gpus(self) -> int:
        """GPUs of the spare nodes."""
        return 0 if self.goodput is None else self.goodput.spare_gpus

    @property
    def gpu_hours(self) -> float:
        """Hours of all GPUs together, spare nodes included."""
        return (self.gpus + self.spare_gpus) * self.passing_s / SECONDS_PER_HOUR

    @property
    def cost(self) -> float | None:
        """Cost of these hours; None without a price."""
        return None if self.price is None else self.gpu_hours * self.price.per_gpu_hour

    @property
    def energy_kwh(self) -> float | None:
        """Energy of the GPUs at their rated power, an upper bound; None if the power is unknown."""
        if self.gpu_power_w is None:
            return None
        return self.gpus * self.gpu_power_w * self.passing_s / JOULES_PER_KWH

    @property
    def expected_kwh(self) -> float | None:
        """Expected energy of the GPUs, at the measured fraction `DRAWN` of the rated power."""
        return None if self.energy_kwh is None else DRAWN * self.energy_kwh

    def text(self) -> str:
        """Return the whole budget as one line."""
        tokens = format_count(self.tokens)
        passing, steps = days_text(self.days), days_text(self.seconds / SECONDS_PER_DAY)
        time = f"{passing} on {self.gpus:,} GPUs"
        time += f" ({steps} of steps alone)" if passing != steps else ""
        hours = f"{_count(self.gpu_hours)} GPU hours"
        hours += f" with {self.spare_gpus:,} GPUs to spare" if self.spare_gpus else ""
        parts = [f"{tokens} tokens: {time}, {hours}"]
        if self.price is not None and self.cost is not None:
            rate = f"{self.price.per_gpu_hour:.2f} per GPU hour"
            rate += "" if self.price.source == "--price" else f", {self.price.source}"
            parts.append(f"{_count(self.cost)} {self.price.currency}".rstrip() + f" ({rate})")
        if self.energy_kwh is not None and self.expected_kwh is not None:
            parts.append(f"about {_count(self.expected_kwh)} kWh for the GPUs")
        return "; ".join(parts)

    def facts(self) -> list[tuple[str, str]]:
        """Return the lines on the training and its goodput."""
        lost = [] if self.goodput is None else self.goodput.facts(self.seconds)
        return [("training", self.text()), *lost]

    def to_dict(self) -> dict[str, object]:
        """Return the whole budget; names end in units."""
        return {
            "tokens": self.tokens,
            "days": self.days,
            "days_of_steps": self.seconds / SECONDS_PER_DAY,
            "gpu_hours": self.gpu_hours,
            "cost": self.cost,
            "currency": None if self.price is None else self.price.currency,
            "price_source": None if self.price is None else self.price.source,
            "energy_kwh_at_most": self.energy_kwh,
            "energy_kwh_expected": self.expected_kwh,
            "goodput": None if self.goodput is None else self.goodput.to_dict(),
        }


def days_text(days: float) -> str:
    """Return a time with its unit: hours below a day, years from a year on."""
    if days >= DAYS_PER_YEAR:
        return f"{days / DAYS_PER_YEAR:,.1f} years"
    return f"{days:,.1f} days" if days >= 1 else f"{days * 24:.1f} hours"


def _count(number: float) -> str:
    return format_count(round(number)) if number >= 100 else f"{number:.3g}"


def price_of(gpu: str, price: float | None, prices: str | PathLike[str] | None) -> Price | None:
    """Return the price of a GPU: `price`, or from the file `prices`; None without both.

    Raises:
        MistakeError: both are given, or the file is invalid or has no price of the GPU.
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
    """Return a number of tokens from text such as 15e12 or "15T".

    Raises:
        MistakeError: it is not a number of tokens.
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
        MistakeError: it is not a duration.
    """
    try:
        return None if text is None else parse_duration(text)
    except UnitError as error:
        raise MistakeError(f"{option}: {error}") from None


BATCH_UNITS = {"K": 2**10, "M": 2**20}
"""Tokens of a unit of a batch."""


def batch_of(text: str | None, option: str = "--batch", example: str = "4M or 512k") -> int | None:
    """Return the tokens of a step or of a sequence; k and M are 2^10 and 2^20.

    Raises:
        MistakeError: it is not a number of tokens.
    """
    if text is None:
        return None
    number, unit = text.strip(), 1
    if (letter := number[-1:].upper()) in BATCH_UNITS:
        number, unit = number[:-1], BATCH_UNITS[letter]
    try:
        return parse_tokens(number) * unit
    except UnitError:
        raise MistakeError(
            f"{option}: {text!r} must be a whole number of tokens, such as {example}"
        ) from None
