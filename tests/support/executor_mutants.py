"""All mutants of the executor, by name: ranks are told the name alone."""

from executor_mutant import Mutant
from mutants_of_flights import MUTANTS_OF_FLIGHTS
from mutants_of_memory import MUTANTS_OF_MEMORY
from mutants_of_trainers import MUTANTS_OF_TRAINERS
from mutants_of_units import MUTANTS_OF_UNITS
from mutants_of_waits import MUTANTS_OF_WAITS

BY_KIND = {
    "waits": MUTANTS_OF_WAITS,
    "memory": MUTANTS_OF_MEMORY,
    "flights": MUTANTS_OF_FLIGHTS,
    "units": MUTANTS_OF_UNITS,
    "trainers": MUTANTS_OF_TRAINERS,
}
MUTANTS: tuple[Mutant, ...] = tuple(each for kind in BY_KIND.values() for each in kind)
BY_NAME = {each.name: each for each in MUTANTS}
