"""MLCommons Chakra's messages (proto3, package ChakraProtoMsg), described in code: no generated files, no compiler."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from stepscope.core.errors import MissingDependencyError

INVALID, METADATA, MEMORY_LOAD, MEMORY_STORE, COMPUTE, SEND, RECEIVE, COLLECTIVE = range(8)
NODE_TYPES = (
    "INVALID_NODE",
    "METADATA_NODE",
    "MEM_LOAD_NODE",
    "MEM_STORE_NODE",
    "COMP_NODE",
    "COMM_SEND_NODE",
    "COMM_RECV_NODE",
    "COMM_COLL_NODE",
    "STORAGE_NODE",
    "BATCH_NODE",
    "CHECKPOINT_NODE",
)

COLLECTIVE_TYPES = (
    "ALL_REDUCE",
    "REDUCE",
    "ALL_GATHER",
    "GATHER",
    "SCATTER",
    "BROADCAST",
    "ALL_TO_ALL",
    "REDUCE_SCATTER",
    "REDUCE_SCATTER_BLOCK",
    "BARRIER",
)

SCALARS = (
    ("double", "TYPE_DOUBLE"),
    ("float", "TYPE_FLOAT"),
    ("int32", "TYPE_INT32"),
    ("int64", "TYPE_INT64"),
    ("uint32", "TYPE_UINT32"),
    ("uint64", "TYPE_UINT64"),
    ("sint32", "TYPE_SINT32"),
    ("sint64", "TYPE_SINT64"),
    ("fixed32", "TYPE_FIXED32"),
    ("fixed64", "TYPE_FIXED64"),
    ("sfixed32", "TYPE_SFIXED32"),
    ("sfixed64", "TYPE_SFIXED64"),
    ("bool", "TYPE_BOOL"),
    ("string", "TYPE_STRING"),
    ("bytes", "TYPE_BYTES"),
)
"""Kinds of an attribute in the order of their field numbers: a value from 3 on, its list one further."""

ATTRIBUTE_FIELDS = {
    "is_cpu_op": "bool_val",
    "num_ops": "int64_val",
    "tensor_size": "uint64_val",
    "tensor_loc": "int32_val",
    "comm_type": "int64_val",
    "comm_priority": "int32_val",
    "comm_size": "int64_val",
    "comm_src": "int32_val",
    "comm_dst": "int32_val",
    "comm_tag": "int32_val",
    "pg_name": "string_val",
}
"""The field each attribute must be written to: feeders read that one and no other."""


class Messages(NamedTuple):
    """Classes of the messages that a file is made of."""

    metadata: Any
    node: Any
    attribute: Any


@cache
def messages() -> Messages:
    """The classes, made on first use."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise MissingDependencyError(
            "reading and writing Chakra files needs protobuf", hint="pip install 'stepscope[read]'"
        ) from None
    file = _describe(descriptor_pb2)
    # A pool of its own: the default one may hold Chakra's own definition under the same names.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)

    def made(name: str) -> Any:
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))

    return Messages(made("GlobalMetadata"), made("Node"), made("AttributeProto"))


def _describe(descriptor_pb2: Any) -> Any:
    field_type = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="chakra_et_def.proto", package="ChakraProtoMsg", syntax="proto3")

    def field(
        message: Any, name: str, number: int, kind: str, *, many: bool = False, of: str = "", choice: int | None = None
    ) -> None:
        label = field_type.LABEL_REPEATED if many else field_type.LABEL_OPTIONAL
        made = message.field.add(name=name, number=number, type=getattr(field_type, kind), label=label)
        if of:
            made.type_name = f".ChakraProtoMsg.{of}"
        if choice is not None:
            made.oneof_index = choice

    attribute = file.message_type.add(name="AttributeProto")
    field(attribute, "name", 1, "TYPE_STRING")
    field(attribute, "doc_string", 2, "TYPE_STRING")
    attribute.oneof_decl.add(name="value")
    for place, (scalar, kind) in enumerate(SCALARS):
        of_list = f"{scalar.capitalize()}List"
        field(attribute, f"{scalar}_val", 3 + 2 * place, kind, choice=0)
        field(attribute, f"{scalar}_list", 4 + 2 * place, "TYPE_MESSAGE", of=of_list, choice=0)
        field(file.message_type.add(name=of_list), "values", 1, kind, many=True)

    metadata = file.message_type.add(name="GlobalMetadata")
    field(metadata, "version", 1, "TYPE_STRING")
    field(metadata, "attr", 2, "TYPE_MESSAGE", many=True, of="AttributeProto")

    types = file.enum_type.add(name="NodeType")
    for number, name in enumerate(NODE_TYPES):
        types.value.add(name=name, number=number)
    arguments = file.message_type.add(name="IOInfo")
    for number, name in enumerate(("values", "shapes", "types"), 1):
        field(arguments, name, number, "TYPE_STRING")

    node = file.message_type.add(name="Node")
    field(node, "id", 1, "TYPE_UINT64")
    field(node, "name", 2, "TYPE_STRING")
    field(node, "type", 3, "TYPE_ENUM", of="NodeType")
    field(node, "ctrl_deps", 4, "TYPE_UINT64", many=True)
    field(node, "data_deps", 5, "TYPE_UINT64", many=True)
    field(node, "start_time_micros", 6, "TYPE_UINT64")
    field(node, "duration_micros", 7, "TYPE_UINT64")
    field(node, "inputs", 8, "TYPE_MESSAGE", of="IOInfo")
    field(node, "outputs", 9, "TYPE_MESSAGE", of="IOInfo")
    field(node, "attr", 10, "TYPE_MESSAGE", many=True, of="AttributeProto")
    return file
