"""Rules by which parameters of right schedules are updated, a group of them, a loss scale."""

from dataclasses import replace

from zsim.strategy.optimizer_rule import LEARNING_RATE, SGD, Adam, ParameterGroup
from zsim.strategy.train import LossScale

ADAM = Adam(learning_rate=0.01, epsilon=1e-5, weight_decay=0.1)
NO_DECAY = (ParameterGroup(parameters=("*.ln*",), rule=replace(ADAM, weight_decay=0.0)),)
GIVEN = replace(ADAM, learning_rate=LEARNING_RATE)
MOMENTUM = SGD(learning_rate=LEARNING_RATE, momentum=0.875, weight_decay=0.125, nesterov=True)
SCALE = LossScale(interval=2)
