"""Write down the wire as a release has it: `python scripts/freeze.py 0.1.0`.

    tests/frozen/0.1.0/protos.binpb    the image of protos/ that `buf breaking` compares with
    tests/frozen/0.1.0/kv_frames.json  one frame of the KV channel of each type, all fields set, in
                                       hexadecimal digits

A release is frozen once: the files of one that is there are never written again. Its commit is
added by hand, as tests/frozen/0.1.0/commit, once there is one: bench.rolling_upgrade checks it out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kv_transfer.frame import FRAME_TYPES, encode

ROOT = Path(__file__).resolve().parent.parent
FROZEN = ROOT / "tests" / "frozen"


def main() -> int:
    """0: done. 1: that release is frozen already, or buf refuses the protos."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release", help="its version, as in CHANGELOG.md")
    folder = FROZEN / parser.parse_args().release
    if folder.exists():
        sys.stderr.write(f"{folder.relative_to(ROOT)} is there: a release is frozen once\n")
        return 1
    folder.mkdir(parents=True)
    frames = {kind.__name__: encode(filled(kind())).hex() for kind in FRAME_TYPES.values()}
    (folder / "kv_frames.json").write_text(json.dumps(frames, indent=1) + "\n")
    buf = Path(sys.executable).parent / "buf"
    image = folder / "protos.binpb"
    command = [buf, "build", ROOT / "protos", "--exclude-source-info", "-o", image]
    return subprocess.run(command, check=False).returncode


def filled(message: Message) -> Message:
    """The message with all its fields set, each to a value that follows from its number."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type and field.is_repeated:
            filled(getattr(message, field.name).add())
        elif field.message_type:
            filled(getattr(message, field.name))
        elif field.is_repeated:
            getattr(message, field.name).extend([_value_of(field), _value_of(field)])
        else:
            setattr(message, field.name, _value_of(field))
    return message


def _value_of(field: FieldDescriptor) -> object:
    if field.enum_type:
        return field.enum_type.values[-1].number
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            is_text = field.type == FieldDescriptor.TYPE_STRING
            return field.name if is_text else field.name.encode()
        case FieldDescriptor.CPPTYPE_BOOL:
            return True
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return field.number + 0.5
    return field.number


if __name__ == "__main__":
    sys.exit(main())
