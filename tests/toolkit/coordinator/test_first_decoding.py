"""The first updates that come at the same moment: msgspec describes their type only once."""

from commands import run_code

PROGRAM = """
import os, sys, threading
import msgspec
from device_agent.formats.update import UpdateRecord
from profiles.json_decoding import build_decoders

def decode(barrier):
    barrier.wait()
    try:
        msgspec.json.decode(b'{"version": 1, "base": "x", "profile": {}}', type=UpdateRecord)
    except msgspec.MsgspecError:
        pass

crashed = 0
for number in range(40):
    child = os.fork()
    if not child:
        build_decoders([UpdateRecord])
        sys.setswitchinterval(1e-6)
        barrier = threading.Barrier(16)
        threads = [threading.Thread(target=decode, args=(barrier,)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
    crashed += os.waitpid(child, 0)[1] != 0
print(crashed)
"""


def crashes() -> int:
    """How many of 40 processes crash whose threads decode their first record at once."""
    done = run_code(PROGRAM).succeeded()
    return int(done.stdout)


def test_decoders_that_were_built_before_do_not_crash() -> None:
    """Without `build_decoders`, several of the 40 crash with msgspec 0.22."""
    assert crashes() == 0
