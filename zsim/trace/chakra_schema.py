"""Messages of Chakra execution traces, and files of them.

Names and numbers of fields are those of `schema/protobuf/et_def.proto` of mlcommons/chakra 1.0.0. A
file is a `GlobalMetadata` followed by the `Node` messages, each prefixed with its length as a
varint (`src/third_party/utils/protolib.py`). Attributes and their expected types are those of
`src/feeder/et_feeder_node.cpp`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from io import BytesIO
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from google.protobuf.proto import parse_length_prefixed, serialize_length_prefixed

VERSION = "1.0.0"

Value = bool | int | float | str | bytes | list[Any]
"""Value of an attribute."""


class ChakraError(ValueError):
    """A file that is not a Chakra trace; the message names the position."""


class NodeKind(IntEnum):
    """Kinds of nodes, with their numbers in the schema."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


class CommKind(IntEnum):
    """Kinds of collectives, with their numbers in the schema."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class ChakraNode:
    """A node of a trace.

    Attributes:
        number: its id, unique in its file.
        name: its name.
        kind: the kind of its work.
        data_deps: ids of all nodes that have ended when it starts.
        ctrl_deps: ids of those among them that it follows in program order.
        duration_us: its duration in microseconds; 0 if not known.
        attributes: values by name; the name determines the type.
    """

    number: int
    name: str
    kind: NodeKind
    data_deps: tuple[int, ...] = ()
    ctrl_deps: tuple[int, ...] = ()
    duration_us: int = 0
    attributes: Mapping[str, Value]


_SCALARS = (
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
    *("fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes"),
)
"""Types of values, in the order of their fields: each has a field for a value and for a list."""

_WRITTEN = {
    "is_cpu_op": "bool",
    "num_ops": "int64",
    "tensor_size": "uint64",
    "comm_type": "int64",
    "comm_size": "int64",
    "comm_src": "int32",
    "comm_dst": "int32",
    "comm_tag": "int32",
    "pg_name": "string",
    "stream": "string",
}
"""Type of each attribute that is written."""

_FIRST_VALUE = 3
"""Field number of the first type in an attribute."""


def _file() -> Any:  # noqa: ANN401 (its type is made while it is imported)
    """Return the schema."""
    file = descriptor_pb2.FileDescriptorProto(
        name="et_def.proto", package="ChakraProtoMsg", syntax="proto3"
    )
    field = descriptor_pb2.FieldDescriptorProto

    def add(message: Any, name: str, number: int, kind: str, *, many: bool = False) -> Any:  # noqa: ANN401
        made = message.field.add(name=name, number=number)
        made.label = field.LABEL_REPEATED if many else field.LABEL_OPTIONAL
        if kind[0].isupper():
            made.type, made.type_name = field.TYPE_MESSAGE, f".ChakraProtoMsg.{kind}"
        else:
            made.type = getattr(field, f"TYPE_{kind.upper()}")
        return made

    for kind in _SCALARS:
        add(file.message_type.add(name=f"{kind.title()}List"), "values", 1, kind, many=True)
    attribute = file.message_type.add(name="AttributeProto")
    attribute.oneof_decl.add(name="value")
    add(attribute, "name", 1, "string")
    add(attribute, "doc_string", 2, "string")
    for place, kind in enumerate(_SCALARS):
        number = _FIRST_VALUE + 2 * place
        add(attribute, f"{kind}_val", number, kind).oneof_index = 0
        add(attribute, f"{kind}_list", number + 1, f"{kind.title()}List").oneof_index = 0
    metadata = file.message_type.add(name="GlobalMetadata")
    add(metadata, "version", 1, "string")
    add(metadata, "attr", 2, "AttributeProto", many=True)
    data = file.message_type.add(name="IOInfo")
    for number, name in enumerate(("values", "shapes", "types"), 1):
        add(data, name, number, "string")
    nodes = file.enum_type.add(name="NodeType")
    for each in NodeKind:
        nodes.value.add(name=f"{each.name}_NODE", number=each.value)
    collectives = file.enum_type.add(name="CollectiveCommType")
    for comm in CommKind:
        collectives.value.add(name=comm.name, number=comm.value)
    node = file.message_type.add(name="Node")
    add(node, "id", 1, "uint64")
    add(node, "name", 2, "string")
    kind_of = node.field.add(name="type", number=3, label=field.LABEL_OPTIONAL)
    kind_of.type, kind_of.type_name = field.TYPE_ENUM, ".ChakraProtoMsg.NodeType"
    for number, name in enumerate(("ctrl_deps", "data_deps"), 4):
        add(node, name, number, "uint64", many=True)
    for number, name in enumerate(("start_time_micros", "duration_micros"), 6):
        add(node, name, number, "uint64")
    for number, name in enumerate(("inputs", "outputs"), 8):
        add(node, name, number, "IOInfo")
    add(node, "attr", 10, "AttributeProto", many=True)
    return file


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_file())
_CLASSES: dict[str, Any] = {
    name: message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
    for name in ("AttributeProto", "GlobalMetadata", "Node")
}


def metadata_bytes() -> bytes:
    """Return the first message of a file."""
    return _bytes(_CLASSES["GlobalMetadata"](version=VERSION))


def node_bytes(node: ChakraNode) -> bytes:
    """Return the message of a node."""
    made = _CLASSES["Node"](
        id=node.number,
        name=node.name,
        type=node.kind.value,
        ctrl_deps=node.ctrl_deps,
        data_deps=node.data_deps,
        duration_micros=node.duration_us,
    )
    for name, value in node.attributes.items():
        made.attr.add(name=name, **{f"{_WRITTEN[name]}_val": value})
    return _bytes(made)


def _bytes(message: Any) -> bytes:  # noqa: ANN401 (classes are made of the schema)
    target = BytesIO()
    serialize_length_prefixed(message, target)
    return target.getvalue()


def read_nodes(content: bytes) -> Iterator[ChakraNode]:
    """Yield the nodes of a file in order.

    Raises:
        ChakraError: it is not a Chakra trace.
    """
    source = BytesIO(content)
    if _message("GlobalMetadata", source, 0) is None:
        raise ChakraError("is empty")
    count = 0
    while (found := _message("Node", source, count + 1)) is not None:
        count += 1
        if found.type not in set(NodeKind):
            raise ChakraError(f"node {found.id}: type {found.type} is none of Chakra's")
        yield ChakraNode(
            number=found.id,
            name=found.name,
            kind=NodeKind(found.type),
            data_deps=tuple(found.data_deps),
            ctrl_deps=tuple(found.ctrl_deps),
            duration_us=found.duration_micros,
            attributes=dict(_attributes(found.attr)),
        )


def _attributes(found: Iterable[Any]) -> Iterator[tuple[str, Value]]:
    for each in found:
        kind = each.WhichOneof("value")
        if kind is not None:
            value = getattr(each, kind)
            yield each.name, list(value.values) if kind.endswith("_list") else value


def _message(kind: str, source: BytesIO, number: int) -> Any:  # noqa: ANN401
    """Return the next message; None at the end."""
    try:
        return parse_length_prefixed(_CLASSES[kind], source)
    except (DecodeError, ValueError, EOFError) as error:
        what = "its metadata" if number == 0 else f"node {number}"
        raise ChakraError(f"{what} cannot be read: {error}") from None
