"""A page in secure sums beside an agent: the same bytes for the same draws, the same refusals."""

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from device_agent.formats.atomic_files import fingerprint
from device_agent.formats.evaluation_counts import EvaluationCounts, LocalEvaluation
from device_agent.formats.manifest import TensorEntry
from device_agent.formats.protocol.joining import Invitation
from device_agent.formats.protocol.rounds import Work
from device_agent.formats.protocol.secure_sums import (
    SecureKeys,
    SecureMember,
    SecureTerms,
    SumPrivacy,
)
from device_agent.formats.update import UpdateRecord
from device_agent.privacy.masks import PIECE, add_mask
from device_agent.privacy.secure_group import SecureGroup, adds
from device_agent.privacy.summed_updates import group_mean, update_vector
from page_modules import run_with
from secure_scripts import World, answers
from toolkit.coordinator.devices.coordinator_key import CoordinatorKey

pytestmark = pytest.mark.web
VECTORS = Path(__file__).parents[2] / "device_agent/privacy/secure_vectors.json"

ATTEMPTS = """
const texts = `${out}.texts.mjs`;
await build({
  entryPoints: ["texts/english_faults.ts"],
  bundle: true,
  format: "esm",
  outfile: texts,
  logLevel: "error",
});
const { ENGLISH_FAULTS } = await import(texts);
const asMap = (object) => new Map(Object.entries(object));
const hex = (bytes) => Buffer.from(bytes).toString("hex");
const CALLS = {
  shares: (sharer, members) => sharer.shares(members),
  masked: (sharer, shares, vector) => {
    const numbers = new Uint32Array(new Uint8Array(Buffer.from(vector, "hex")).buffer);
    sharer.masked(asMap(shares), numbers);
    return hex(numbers.buffer);
  },
  confirmed: (sharer, present) => sharer.confirmed(present),
  unmasking: (sharer, present, confirmations) => sharer.unmasking(present, asMap(confirmations)),
};
const all = [];
const random = crypto.getRandomValues.bind(crypto);
for (const [device, script] of JSON.parse(readFileSync(given[0]))) {
  const draws = [...device.draws];
  // The library draws other sizes, for which the result does not depend on the numbers.
  crypto.getRandomValues = (bytes) =>
    bytes.length === 32 ? bytes.set(Buffer.from(draws.shift(), "hex")) ?? bytes : random(bytes);
  const pkcs8 = Buffer.from(`302e020100300506032b657004220420${device.private}`, "hex");
  const key = await crypto.subtle.importKey("pkcs8", pkcs8, "Ed25519", false, ["sign"]);
  const sign = async (lines) => {
    const text = Buffer.from(lines.map((line) => `${line}\\n`).join(""));
    return Buffer.from(await crypto.subtle.sign("Ed25519", key, text)).toString("base64");
  };
  const signer = { device: device.device, key: device.key, sign };
  const sharer = await page.SecretSharer.begin(signer, device);
  const found = [sharer.keys];
  for (const [call, ...values] of script) {
    try {
      found.push(await CALLS[call](sharer, ...values));
    } catch (error) {
      const { is, values } = error.fault;
      found.push({ refused: ENGLISH_FAULTS[is](values) });
    }
  }
  all.push(found);
}
console.log(JSON.stringify(all));
"""


def on_a_page(cases: list[list[Any]], folder: Path) -> list[Any]:
    (folder / "cases").write_text(json.dumps(cases))
    return json.loads(run_with("secret_sharer", ATTEMPTS, folder, str(folder / "cases")))


def test_the_messages_of_an_attempt(tmp_path: Path, seed: int) -> None:
    """The recorded attempt, and an attempt with fresh keys."""
    recorded, world = json.loads(VECTORS.read_text()), World(random.Random(seed))
    cases = [[recorded["device"], recorded["script"]], [world.device, world.honest()]]
    found = on_a_page(cases, tmp_path)
    assert found == [recorded["answers"], answers(world.device, world.honest())]
    assert not any("refused" in answer for answer in found[1])


def test_a_coordinator_that_breaks_a_rule(tmp_path: Path, seed: int) -> None:
    """The page refuses what the agent refuses, for the same reason."""
    world = World(random.Random(seed))
    lies = world.lies()
    found = on_a_page([[world.device, script] for script in lies.values()], tmp_path)
    for (lie, script), answered in zip(lies.items(), found, strict=True):
        assert answered == answers(world.device, script), lie
        assert "refused" in answered[-1], lie


GROUPS = """
const found = JSON.parse(readFileSync(given[0])).map(([round, members]) => {
  const group = new page.SecureGroup(round, members);
  const { device } = members[0];
  const context = Buffer.from(group.context).toString("hex");
  const others = members.map((other) => page.adds(device, other.device));
  const [near, holders] = [group.neighbours(device), group.holders(device)];
  return [context, near, holders, group.needed(device), group.confirmations, others];
});
console.log(JSON.stringify(found));
"""


def test_groups_with_a_sparse_graph(tmp_path: Path, seed: int) -> None:
    """Also with ids that JavaScript would sort in another way than Python."""
    draw, groups, expected = random.Random(seed), [], []
    for size in (3, 101, 102, 103, 250):
        names = [f"{draw.choice(['a', 'é', chr(0xFFFD), chr(0x1D4B3)])}-{n}" for n in range(size)]
        members = []
        for name in names:
            mask_key, share_key, key = (draw.randbytes(8).hex() for _ in range(3))
            keys = SecureKeys(bundle="a" * 64, mask_key=mask_key, share_key=share_key, signature="")
            members.append(SecureMember(device=name, key=key, keys=keys))
        group, own = SecureGroup(7, members), names[0]
        groups.append([7, msgspec.to_builtins(members)])
        near, holders = group.neighbours(own), group.holders(own)
        needed, signs = group.needed(own), [adds(own, name) for name in names]
        expected.append([group.context.hex(), near, holders, needed, group.confirmations, signs])
    (tmp_path / "groups").write_text(json.dumps(groups))
    found = json.loads(run_with("secure_group", GROUPS, tmp_path, str(tmp_path / "groups")))
    assert found == expected


SHARES = """
crypto.getRandomValues = (bytes) => bytes.set(Buffer.from(given[0], "hex")) ?? bytes;
const shares = page.splitSecret(new Uint8Array(Buffer.from("7465737400", "hex")), 2, 2);
console.log(JSON.stringify(shares.map((share) => Buffer.from(share).toString("hex"))));
"""


def test_published_shares(tmp_path: Path) -> None:
    """The test vectors of draft-mcgrew-tss-03, section 9: the random row follows from a share."""
    first, second, secret = "b9fa07e185", "f5409b4511", "7465737400"
    row = f"{int(first, 16) ^ int(secret, 16):010x}"
    assert json.loads(run_with("shamir", SHARES, tmp_path, row)) == [first, second]


MASKS = """
const [key, elements] = given;
const vector = new Uint32Array(Number(elements));
page.addMask(vector, new Uint8Array(Buffer.from(key, "hex")));
page.addMask(vector.subarray(7), new Uint8Array(Buffer.from(key, "hex")), true);
writeFileSync(`${out}.vector`, vector);
"""


def test_a_mask_in_pieces(tmp_path: Path, seed: int) -> None:
    key, elements = random.Random(seed).randbytes(32), 2 * PIECE + 100
    run_with("masks", MASKS, tmp_path, key.hex(), str(elements))
    vector = np.zeros(elements, np.uint32)
    add_mask(vector, key)
    add_mask(vector[7:], key, subtract=True)
    assert np.array_equal(np.fromfile(tmp_path / "masks.mjs.vector", "<u4"), vector)


FACTORS = {
    "matrix": {"u": (3, 5), "v": (7, 3)},
    "series": {"v": (6, 2, 1), "u": (2, 4, 3)},
    "groups": {"u": (6, 4, 3, 1), "v": (9, 2, 1, 2)},
}
"""The shapes of low-rank factors by layer."""

UPDATES = """
const tensorsOf = (arrays) => new Map(
  Object.entries(arrays).map(([name, { dtype, shape, data: all }]) => {
    const data = dtype === "int64" ? BigInt64Array.from(all, BigInt) : Float32Array.from(all);
    return [name, { dtype, shape, data }];
  }),
);
const found = JSON.parse(readFileSync(given[0])).map((update) => {
  const [trained, received] = [tensorsOf(update.trained), tensorsOf(update.received)];
  const { record, terms, devices, entropy } = update;
  const numbers = page.updateVector(record, trained, received, terms, devices, entropy);
  return Buffer.from(numbers.buffer).toString("hex");
});
console.log(JSON.stringify(found));
"""


def test_updates_as_whole_numbers(tmp_path: Path, seed: int) -> None:
    """Of numbers within and beyond the clip, of counters, and of counts with halves."""
    draw, cases, expected = np.random.default_rng(seed), [], []
    table = (
        TensorEntry(name="w", role="parameter", dtype="float32", shape=(30, 50)),
        TensorEntry(name="b", role="parameter", dtype="float32", shape=()),
        TensorEntry(name="n", role="buffer", dtype="int64", shape=(3,)),
        *(
            TensorEntry(
                name=f"{layer}.{side}", role="parameter", dtype="float32", shape=shape,
                stands_for=f"{layer}.weight", factor=side,
            )
            for layer, shapes in FACTORS.items()
            for side, shape in shapes.items()
        ),
    )  # fmt: skip
    classes = EvaluationCounts(samples=9, counted=8, correct=3, loss_sum=2.5 / 1024)
    numbers = EvaluationCounts(samples=5, counted=5, loss_sum=-1e15, absolute_sum=1.5 / 1024)
    for devices, evaluation in (
        (3, msgspec.UNSET),
        (
            46,
            LocalEvaluation(
                before=classes, after=msgspec.structs.replace(classes, correct=0, loss_sum=1e15)
            ),
        ),
        (10**4, LocalEvaluation(before=numbers, after=numbers)),
    ):
        terms = SecureTerms(fewest=3, most_change=draw.uniform(0.01, 10), most_samples=300)
        arrays = [
            {
                "w": draw.normal(0, 2, (30, 50)).astype(np.float32),
                "b": np.float32(draw.normal()).reshape(()),
                "n": draw.integers(-(2**50), 2**50, 3),
                **{
                    entry.name: draw.normal(0, 1, entry.shape).astype(np.float32)
                    for entry in table
                    if entry.factor is not None
                },
            }
            for _ in range(2)
        ]
        record = UpdateRecord(
            bundle="a" * 64, base="b", submodel="full", samples=int(draw.integers(1, 600)),
            steps=int(draw.integers(1, 10**9)), loss_first=1.5 / 2**16, loss_last=-1e9,
            tensors=table, file=fingerprint(b""), evaluation=evaluation,
        )  # fmt: skip
        entropy = [int(draw.integers(10**9)), *b"device-1"]
        vector = update_vector(record, *arrays, terms, devices, entropy)
        expected.append(vector.astype("<u4").tobytes().hex())
        trained, received = (
            {
                name: {"dtype": str(a.dtype), "shape": a.shape, "data": a.ravel().tolist()}
                for name, a in those.items()
            }
            for those in arrays
        )
        case = {"trained": trained, "received": received, "devices": devices, "entropy": entropy}
        cases.append(
            {**case, "record": msgspec.to_builtins(record), "terms": msgspec.to_builtins(terms)}
        )
    (tmp_path / "cases").write_text(json.dumps(cases))
    found = json.loads(run_with("summed_updates", UPDATES, tmp_path, str(tmp_path / "cases")))
    assert found == expected


NOISED = """
const { elements, members, terms, devices } = JSON.parse(given[0]);
const table = [{ name: "w", shape: [elements] }];
const record = { samples: 50, steps: 7, loss_first: 3, loss_last: 2, tensors: table };
const tensorsOf = (data) => new Map([["w", { dtype: "float32", shape: [elements], data }]]);
const all = Array.from({ length: members }, (_, member) => {
  const trained = Float32Array.from({ length: elements }, (_, i) => Math.sin((member + 1) * i));
  const received = tensorsOf(new Float32Array(elements));
  return page.updateVector(record, tensorsOf(trained), received, terms, devices, []);
});
writeFileSync(`${out}.numbers`, Buffer.concat(all.map(({ buffer }) => Buffer.from(buffer))));
"""


@pytest.mark.parametrize("noise", [1e-6, 1.5])
def test_the_page_clips_and_adds_its_noise(tmp_path: Path, noise: float) -> None:
    """Six pages are the fewest of a group of ten: five of them have exactly the promised noise."""
    size, members, devices, clip = 20_000, 6, 10, 0.5
    private = SumPrivacy(clip=clip, noise_multiplier=noise)
    terms = SecureTerms(fewest=3, most_change=1.0, most_samples=1, privacy=private)
    asked = {"elements": size, "members": members, "devices": devices}
    asked["terms"] = msgspec.to_builtins(terms)
    run_with("summed_updates", NOISED, tmp_path, json.dumps(asked))
    vectors = np.fromfile(tmp_path / "summed_updates.mjs.numbers", "<u4").reshape(members, -1)
    table = (TensorEntry(name="w", role="parameter", dtype="float32", shape=(size,)),)
    total = vectors.sum(axis=0, dtype=np.uint32)
    mean = group_mean(total, table, terms, devices, members)
    assert (mean.samples, mean.steps, mean.loss_first, mean.loss_last) == (members, 0, 0, 0)
    exact = np.zeros(size)
    for member in range(members):
        change = np.sin((member + 1.0) * np.arange(size)).astype(np.float32).astype(float)
        exact += change * clip / np.linalg.norm(change)
    deviation = noise * clip * np.sqrt(members / (members - 1))
    rest = (members * mean.changes["w"] - exact) / deviation
    assert abs(rest.mean()) < 6 / np.sqrt(size)
    assert abs(rest.std() - 1) < 6 / np.sqrt(2 * size)
    assert abs((rest**4).mean() - 3) < 6 * np.sqrt(96 / size)  # as of a Gaussian


PROMISES = """
const [key, works, invitations] = given.map((text) => JSON.parse(text));
const stored = new Map();
const values = {
  get: async (name) => stored.get(name) ?? null,
  put: async (all) => Object.entries(all).forEach(([name, value]) => stored.set(name, value)),
};
const said = [];
for (const work of works) {
  said.push(await page.checkWork(work, key, values).then(() => true, (error) => error.code));
}
for (const invitation of invitations) {
  const client = { invitation: async () => invitation };
  said.push(await page.invited(client, null).then(({ secure }) => secure, (error) => error.code));
}
console.log(JSON.stringify(said));
"""


def test_a_promise_of_secure_sums_is_kept(tmp_path: Path) -> None:
    key, terms = CoordinatorKey(), SecureTerms(fewest=5, most_change=0.1234565, most_samples=100)

    def signed(**more: Any) -> Any:
        return msgspec.to_builtins(key.signed(Work(round=2, **more), time.time()))

    plain, secure = signed(state="train"), signed(state="train", secure=terms)
    judge, wait = signed(state="judge"), signed(state="wait")
    two = signed(state="train", secure=replace(terms, fewest=2))
    private = SumPrivacy(clip=0.5, noise_multiplier=1.5)
    noise = signed(state="train", secure=replace(terms, privacy=private))
    less = signed(
        state="train", secure=replace(terms, privacy=SumPrivacy(clip=9.0, noise_multiplier=1.4999))
    )
    works = [
        plain, judge, {**secure, "secure": {**secure["secure"], "fewest": 3}}, plain, two, secure,
        plain, judge, wait, secure, noise, less, secure, noise, plain,
    ]  # fmt: skip
    promised = msgspec.to_builtins(key.invites(Invitation(title="Leaves", secure=terms)))
    invitations = [promised, {**promised, "secure": None}]
    given = [json.dumps(value) for value in (key.public, works, invitations)]
    assert json.loads(run_with("trust", PROMISES, tmp_path, *given)) == [
        True, True, "trust.forged-work", True, "bundle.malformed", True,
        "trust.no-secure-sum", "trust.single-figures", True, True, True, "trust.less-noise",
        "trust.less-noise", True, "trust.no-secure-sum",
        msgspec.to_builtins(terms), "trust.forged-invitation",
    ]  # fmt: skip


SENDING = """
const others = `${out}.others.mjs`;
const outfile = others;
await build({ entryPoints: ["agent/secret_sharer.ts"], bundle: true, format: "esm", outfile });
const { SecretSharer } = await import(others);
const text = (lines) => Buffer.from(lines.map((line) => `${line}\\n`).join(""));
const signer = async (device) => {
  const keys = await crypto.subtle.generateKey("Ed25519", true, ["sign", "verify"]);
  const raw = await crypto.subtle.exportKey("raw", keys.publicKey);
  const signature = (lines) => crypto.subtle.sign("Ed25519", keys.privateKey, text(lines));
  const sign = async (lines) => Buffer.from(await signature(lines)).toString("base64");
  return { device, key: Buffer.from(raw).toString("base64"), sign, keys };
};
const terms = { fewest: 3, most_change: 1, most_samples: 100, privacy: null };
const sum = { round: 3, bundle: "ab".repeat(32), terms, apart: 0 };
const coordinator = await signer("coordinator");
const own = await signer("page");
const tensor = { dtype: "float32", shape: [4], data: new Float32Array(4).fill(0.5) };
const received = new Map([["w", { ...tensor, data: new Float32Array(4) }]]);
const header = '{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'.padEnd(56);
const size = Buffer.alloc(8);
size.writeBigUInt64LE(56n);
const content = Buffer.concat([size, Buffer.from(header), Buffer.from(tensor.data.buffer)]);
const tensors = new Uint8Array(content);
const entries = [{ name: "w", shape: [4] }];
const record = { samples: 7, steps: 1, loss_first: 2, loss_last: 1, tensors: entries };
const update = { record: JSON.stringify(record), tensors, sha256: "the update" };

/** A coordinator with two devices of its own, which asks for `steps` one after another. */
class Lying {
  origin = "here";
  sent = [];
  uploads = 0;
  constructor(steps) {
    this.steps = steps;
  }
  async sendToSum(round, part, body) {
    this.sent.push([part, body]);
    if (part !== "keys") return;
    const invented = await Promise.all([signer("invented-1"), signer("invented-2")]);
    const sharers = await Promise.all(invented.map((one) => SecretSharer.begin(one, sum)));
    const mine = { device: "page", key: own.key, keys: body };
    const theirs = invented.map(({ device, key }, i) => ({ device, key, keys: sharers[i].keys }));
    this.members = [...theirs, mine];
    const shares = await Promise.all(sharers.map((sharer) => sharer.shares(this.members)));
    this.shares = Object.fromEntries(invented.map(({ device }, i) => [device, shares[i].page]));
    const line = ({ device, key, keys }) =>
      [device, key, keys.bundle, keys.mask_key, keys.share_key].join(" ");
    const lines = ["edgetailor-secure-group-1", `${round}`, ...this.members.map(line)];
    this.signature = await coordinator.sign(lines);
  }
  async secureStep() {
    const step = this.steps.shift();
    if (typeof step === "number") return { step: "wait", ask_again_s: step };
    if (step === "forged") return { step: "shares", members: this.members, signature: "AAAA" };
    if (step === "shares") return { step, members: this.members, signature: this.signature };
    return step === "input" ? { step, shares: this.shares } : { step };
  }
  async sendTensors() {
    this.uploads++;
    if (this.steps[0] === "killed") throw new Error("killed");
  }
}

const found = [];
for (const steps of JSON.parse(given[0])) {
  const stored = new Map();
  const values = {
    get: async (name) => stored.get(name) ?? null,
    put: async (all) => Object.entries(all).forEach(([name, value]) => stored.set(name, value)),
  };
  const client = new Lying(steps);
  const key = { check: (check) => check(coordinator.key) };
  const bundle = { sha256: sum.bundle, tensors: async () => received };
  const waits = [];
  const rest = async (milliseconds) => void waits.push(milliseconds);
  const sending = new page.SecureSending(client, own, key, values, rest, bundle, update);
  const work = { round: 3 };
  const result = await sending.add(work, terms).catch((error) => error.code ?? error.message);
  const parts = client.sent.map(([part]) => part);
  const keys = client.sent.filter(([part]) => part === "keys").map(([, body]) => body.mask_key);
  const used = stored.get("secureSums") ?? null;
  const left = client.steps.length;
  found.push([result, parts, new Set(keys).size, client.uploads, used, left, waits]);
}
console.log(JSON.stringify(found));
"""


def test_an_update_is_behind_masks_once(tmp_path: Path) -> None:
    """A coordinator that repeats a sum with other devices does not get the same update again."""
    steps = [
        ["wait", "shares", "input", "again", "shares", "input"],
        ["shares", "again", "shares", "input", "over"],
        ["shares", "input", "killed"],
        ["forged", "input"],
        ["no step", "shares"],
        [1e-3, -5, 1e9, "over"],
    ]
    found = json.loads(run_with("secure_sending", SENDING, tmp_path, json.dumps(steps)))
    used = {"round": 3, "masked": 1, "used": "the update"}
    sent = ["keys", "shares", "input"]
    assert found == [
        [False, sent, 1, 1, used, 2, [250]],
        [False, ["keys", "shares", *sent], 2, 1, used, 0, []],
        ["killed", sent[:2], 1, 1, used, 1, []],
        ["trust.forged-work", ["keys"], 1, 0, None, 1, []],
        ["client.not-a-coordinator", ["keys"], 1, 0, None, 1, []],
        [False, ["keys"], 1, 0, None, 0, [1, 250, 300_000]],
    ]
