"""`full`: the whole model, trained as it is (FedAvg)."""

from torch import Tensor, nn

from device_agent.manifest import SAMPLES, Step, Train
from exporters.capture import capture
from exporters.optimizers import SGD
from exporters.program import Program
from exporters.signatures import apply, train
from toolkit.counting import Counts, activations, macs
from toolkit.entries import dense_entries
from toolkit.spec import Spec
from toolkit.submodel import Dense, Submodel
from toolkit.training import TrainingConfig
from toolkit.weights import GlobalModel


class Full(Dense):
    """Every layer is sent, trained and averaged."""

    name = "full"
    usage = "full"
    summary = "the whole model"

    def split(
        self,
        model: nn.Module,
        sample_shape: tuple[int, ...],
        spec: Spec,
        training: TrainingConfig,
    ) -> Submodel:
        """See Family."""
        spec.check_no_size()
        spec.check_options()
        captured = capture(model, sample_shape)
        parameters = dense_entries(captured, captured.parameters, "parameter")
        buffers = dense_entries(captured, captured.buffers, "buffer")
        optimizer = SGD(momentum=training.momentum, weight_decay=training.weight_decay)
        program = Program(
            submodel=str(spec),
            sample_shape=sample_shape,
            classes=captured.classes,
            signatures=(
                train(captured.training, sample_shape, parameters, buffers, optimizer),
                apply("predict", captured.inference, sample_shape, (*parameters, *buffers)),
            ),
            tensors=(*parameters, *buffers, *optimizer.state(parameters)),
            schedule=(one_pass(SAMPLES, training),),
        )
        total = sum(value.numel() for value in captured.parameters.values())

        def cut(weights: GlobalModel) -> dict[str, Tensor]:
            return {e.name: weights.tensors[e.name] for e in (*parameters, *buffers)}

        return Submodel(
            spec=spec,
            program=program,
            counts=Counts(
                params=total,
                activations=activations(captured.training, training.batch_size),
                macs=macs(captured.training, training.batch_size),
                exchanged=total + sum(value.numel() for value in captured.buffers.values()),
            ),
            treatments=(),
            cut=cut,
        )


def one_pass(source: str, training: TrainingConfig) -> Train:
    """The usual schedule: one `train` step on each batch of `source`."""
    return Train(
        source=source,
        epochs=training.epochs,
        batch_size=training.batch_size,
        steps=(Step(signature="train", inputs={"rate": training.learning_rate}),),
    )


FAMILY = Full()
