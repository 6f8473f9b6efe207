"""Records: one immutable JSON file a point, named by the hash of the point.  Imports no torch.

A *point* is a plain dict that decides a result completely; a *record* is what running it gave.  The file name
is a function of the point alone, so that "has this been computed?" needs no index, and machines that share a
folder need no lock.  Every write goes to a temporary name in the same folder first: a reader never sees half
a record.
"""

from quantlab.records.record import (
    FIELDS,
    KINDS,
    PROTOCOLS,
    RECORD_NAME,
    SCHEMA_VERSION,
    STATUSES,
    canonical_json,
    complete_record,
    content_hash,
    decode,
    encode,
    iterate_records,
    load_record,
    load_records,
    protocol_fingerprint,
    record_path,
    save_record,
    validate_record,
)
from quantlab.records.streams import (
    STREAM_SCHEMA_VERSION,
    load_stream_file,
    open_stream_file,
    save_stream_file,
    stream_file_hash,
)
from quantlab.records.writing import (
    MINIMUM_FREE_BYTES,
    atomic_folder,
    atomic_path,
    check_output_folder,
    check_output_place,
    remove_stale,
    write_atomic,
)

__all__ = [
    "FIELDS",
    "KINDS",
    "MINIMUM_FREE_BYTES",
    "PROTOCOLS",
    "RECORD_NAME",
    "SCHEMA_VERSION",
    "STATUSES",
    "STREAM_SCHEMA_VERSION",
    "atomic_folder",
    "atomic_path",
    "canonical_json",
    "check_output_folder",
    "check_output_place",
    "complete_record",
    "content_hash",
    "decode",
    "encode",
    "iterate_records",
    "load_record",
    "load_records",
    "load_stream_file",
    "open_stream_file",
    "protocol_fingerprint",
    "record_path",
    "remove_stale",
    "save_record",
    "save_stream_file",
    "stream_file_hash",
    "validate_record",
    "write_atomic",
]
