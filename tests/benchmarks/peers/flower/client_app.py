"""A client in Flower: it trains with PyTorch and sends the whole model back."""

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from net import Net
from torch.utils.data import DataLoader, TensorDataset

BATCH, EPOCHS, RATE, MOMENTUM = 32, 2, 0.05, 0.9
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    with np.load(str(context.node_config["data"])) as file:
        samples = TensorDataset(torch.from_numpy(file["x"]), torch.from_numpy(file["y"]))
    batches = DataLoader(samples, BATCH, shuffle=True)
    model, loss = Net(), torch.nn.CrossEntropyLoss()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    model.train()
    for _ in range(EPOCHS):
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    arrays = ArrayRecord(model.state_dict())
    metrics = MetricRecord({"num-examples": len(samples)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
