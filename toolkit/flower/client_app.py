"""Flower's ClientApp: the gateway between Flower and the coordinator of a site.

It gives the coordinator the global model and waits for its partial aggregate. Both pass through the
state folder of `edgetailor serve`, which runs beside the SuperNode.
"""

import time
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from profiles.errors import ClientError
from toolkit.coordinator.site import SITE, SiteTask, give_task, partial_for
from toolkit.flower.strategy import PARTIAL, TASK

POLL_S = 0.2

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One round of the site whose state folder the key `state` of the node's configuration names.

    Raises ClientError if the site has no partial aggregate in time.
    """
    given = message.content[TASK]
    site = Path(str(context.node_config["state"])) / SITE
    task = SiteTask(name=str(given["name"]), round=int(given["round"]))
    end = time.monotonic() + float(given["timeout"])
    if partial_for(site, task) is None:
        give_task(site, task, bytes(given["model"]))
    while (files := partial_for(site, task)) is None:
        if time.monotonic() > end:
            raise ClientError(
                f"The site has no partial aggregate of round {task.round} after "
                f"{given['timeout']:g} s. Check that `edgetailor serve` runs with this state "
                "folder, and lower its `deadline_s`.",
                code="site.timeout",
                round=task.round,
            )
        time.sleep(POLL_S)
    return Message(RecordDict({PARTIAL: ConfigRecord(dict(files))}), reply_to=message)
