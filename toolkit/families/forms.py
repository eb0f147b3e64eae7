"""The specs that each family accepts. Nothing here imports torch."""

from toolkit.submodels.spec_form import Choice, Number, Option, SpecForm, Text

CP = SpecForm(
    family="cp",
    usage="cp:RATE",
    summary=(
        "CP factors and a personal model that stays on the device (TDPFed); "
        "penalty=, personal-steps=, factor-steps=, factor-rate=, personal-start="
    ),
    size=Number("compression rate", "cp:2.0"),
    options=(
        Option("penalty"),
        Option("personal-steps", lowest=1, whole=True),
        Option("factor-steps", lowest=1, whole=True),
        Option("factor-rate"),
        Choice("personal-start", ("kept", "aggregate")),
    ),
)
DEPTH = SpecForm(
    family="depth",
    usage="depth:RATIO",
    summary="the first blocks of every stage (InclusiveFL)",
    size=Number("share of the blocks of a stage", "depth:0.5", 1),
)
FULL = SpecForm(family="full", usage="full", summary="the whole model")
LOW_RANK = SpecForm(
    family="low-rank",
    usage="low-rank:RATIO",
    summary="truncated-SVD factors of convolution and linear layers (FedHM); keep=, decay=",
    size=Number("rank ratio", "low-rank:0.25", 1),
    options=(Option("keep", whole=True), Option("decay")),
    exchanges_layers=True,
)
PFEDME = SpecForm(
    family="pfedme",
    usage="pfedme",
    summary=(
        "the whole model and a personal one that stays on the device (pFedMe); "
        "penalty=, personal-steps=, local-rate=, personal-start="
    ),
    options=(
        Option("penalty"),
        Option("personal-steps", lowest=1, whole=True),
        Option("local-rate"),
        Choice("personal-start", ("kept", "aggregate")),
    ),
)
SLICE = SpecForm(
    family="slice",
    usage="slice:CAPACITY or slice:MODULE",
    summary=(
        "the output-side layers, trained on recorded activations (EmbracingFL); skip=, "
        "recording=float16, frozen=int8; slice:...+low-rank:... factorizes them too"
    ),
    size=Text(
        "first module to train or the largest capacity allowed", "slice:blocks.3 or slice:0.42"
    ),
    options=(
        Option("skip", whole=True),
        Choice("recording", ("float32", "float16")),
        Choice("frozen", ("float32", "int8")),
    ),
    selects_layers=True,
)
WIDTH = SpecForm(
    family="width",
    usage="width:RATIO",
    summary="the leading channels of every layer (HeteroFL), or a rolling window; scaler=, window=",
    size=Number("channel ratio", "width:0.5", 1),
    options=(Choice("scaler", ("off", "on")), Choice("window", ("leading", "rolling"))),
)

FORMS = {form.family: form for form in (CP, DEPTH, FULL, LOW_RANK, PFEDME, SLICE, WIDTH)}
"""The form of each family, by the family's name, which is also the name of its module."""
