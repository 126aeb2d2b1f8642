"""RankMessages: what the engine sends to a rank. Steps are for the rank's loop; changes of the weights, which come
between steps, are carried out here and answered over the rank's socket."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from nvcli.core.messages import StepInput
from nvcli.core.weight_changes import WeightsChange, WeightsChanged
from nvcli.errors import CapacityError, ConfigError, LoadError
from nvcli.worker.executor.channel import ChannelReader
from nvcli.worker.runner.interface import Runner


class RankMessages:
    """The messages to one rank, in order."""

    def __init__(
        self, reader: ChannelReader, runner: Runner, control: Connection, report_phase: Callable[[str], None]
    ) -> None:
        self._reader = reader
        self._runner = runner
        self._control = control
        self._report_phase = report_phase
        self._decoder: msgspec.msgpack.Decoder[StepInput | WeightsChange] = msgspec.msgpack.Decoder(
            StepInput | WeightsChange
        )

    def next_step(self) -> StepInput:
        """Wait for the next step, and carry out the changes that come before it. Raises ChannelClosed."""
        while not isinstance(message := self._decoder.decode(self._reader.receive()), StepInput):
            self._report_phase("changing the weights")
            self._control.send(change_weights(self._runner, message))
        return message


def change_weights(runner: Runner, change: WeightsChange) -> WeightsChanged:
    """Let a runner change its weights; return the error for which nothing was changed, if there is one."""
    try:
        runner.change_weights(change)
    except (LoadError, ConfigError, CapacityError) as error:
        return WeightsChanged(type(error).__name__, str(error))
    return WeightsChanged()
