"""The judge of a simulated round's model; see `toolkit/aggregation/model_judge.py`.

Workers return sums, not single updates. If the judge needs single updates, the clients train once
more. With the same seed, they give the same updates.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from profiles.errors import EdgeTailorError
from toolkit.aggregation.federation import Federation
from toolkit.aggregation.model_judge import Aim, harmful, judged_text, search_order
from toolkit.aggregation.rules.rule_aggregation import new_aggregation
from toolkit.evaluation_sums import Evaluation
from toolkit.simulation.chunks import TrainedChunk
from toolkit.simulation.client_limits import ClientLimits
from toolkit.simulation.update_files import UpdateFiles


@dataclass
class ClientJudge:
    """Finds the clients without whose updates the model of a round reaches `aim`.

    Attributes:
        federation: The global model, with all updates in it.
        before: The model that the clients trained from, as bytes of `Federation.save`.
        held_out: Samples and labels.
        aim: What the new model must reach.
        limits: The limits of the round's updates; None for none.
    """

    federation: Federation
    before: bytes
    held_out: tuple[np.ndarray, np.ndarray]
    aim: Aim
    limits: ClientLimits | None

    def judge(
        self, whole: Evaluation, trained_again: Iterable[TrainedChunk]
    ) -> tuple[Evaluation, dict[str, str]]:
        """Make the model without the updates that make it worse. It stays if there are none.

        Args:
            whole: The evaluation of the model with all updates.
            trained_again: The same trainings, with single updates within their limits.

        Returns:
            The evaluation of the new model, and for each client left out, the reason.
        """
        after, files, kinds = self.federation.save(), UpdateFiles(), dict[int, str]()
        for chunk in trained_again:
            for client, update in chunk.updates.items():
                files.add(client, update)
                kinds[client] = update[0].submodel

        def evaluated(out: Collection[str]) -> Evaluation:
            self.federation.load(self.before)
            aggregation = new_aggregation(self.federation.model, self.federation.policy)
            for client, update in files.read():
                if str(client) not in out:
                    aggregation.add_checked(*update)
            if self.limits is not None:
                self.limits.limit_statistics(aggregation, {int(client) for client in out})
            if aggregation.updates:
                self.federation.take(aggregation)
            return self.federation.evaluation(*self.held_out)

        def is_good(out: Collection[str]) -> bool:
            try:
                return self.aim.is_reached(evaluated(out))
            except EdgeTailorError:
                return False

        limited = {} if self.limits is None else dict(self.limits.limited)

        def order(client: int) -> tuple[float, str, int]:
            return *search_order(limited.get(client), kinds[client]), client

        clients = sorted(files.clients, key=order)
        found = harmful([str(client) for client in clients], is_good, self.aim.stalled)
        new = evaluated(found) if found else whole
        files.remove()
        if not found:
            self.federation.load(after)
            if self.limits is not None:
                self.limits.limited = limited
        return new, dict.fromkeys(found, judged_text(new, whole))
