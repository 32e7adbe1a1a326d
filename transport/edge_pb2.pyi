from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Raw(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("padding",)
    PADDING_FIELD_NUMBER: _ClassVar[int]
    padding: bytes
    def __init__(self, padding: _Optional[bytes] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("name", "protocol", "secure", "sessions", "slices_bytes", "slices_limit_bytes", "profile", "clock_s", "leaving", "sleeps")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SLICES_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLICES_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    SLEEPS_FIELD_NUMBER: _ClassVar[int]
    name: str
    protocol: int
    secure: bool
    sessions: _containers.RepeatedCompositeFieldContainer[SessionState]
    slices_bytes: int
    slices_limit_bytes: int
    profile: DeviceProfile
    clock_s: float
    leaving: bool
    sleeps: bool
    def __init__(self, name: _Optional[str] = ..., protocol: _Optional[int] = ..., secure: _Optional[bool] = ..., sessions: _Optional[_Iterable[_Union[SessionState, _Mapping]]] = ..., slices_bytes: _Optional[int] = ..., slices_limit_bytes: _Optional[int] = ..., profile: _Optional[_Union[DeviceProfile, _Mapping]] = ..., clock_s: _Optional[float] = ..., leaving: _Optional[bool] = ..., sleeps: _Optional[bool] = ...) -> None: ...

class DeviceProfile(_message.Message):
    __slots__ = ("name", "system", "machine", "cpu", "cores_physical", "cores_logical", "threads", "cpu_quota", "memory_total_bytes", "memory_available_bytes", "memory_limit_bytes", "gpu", "battery_percent", "plugged", "temperature_c", "python", "runtime", "llama_cpp", "host", "memory_bytes_per_s", "flops", "page_round_trip_s", "page_bytes_per_s", "gpu_total_bytes", "gpu_free_bytes", "load", "disk_total_bytes", "disk_free_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    CORES_PHYSICAL_FIELD_NUMBER: _ClassVar[int]
    CORES_LOGICAL_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    CPU_QUOTA_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    BATTERY_PERCENT_FIELD_NUMBER: _ClassVar[int]
    PLUGGED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_C_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_FIELD_NUMBER: _ClassVar[int]
    LLAMA_CPP_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    PAGE_ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    GPU_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DISK_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    system: str
    machine: str
    cpu: str
    cores_physical: int
    cores_logical: int
    threads: int
    cpu_quota: float
    memory_total_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int
    gpu: str
    battery_percent: float
    plugged: bool
    temperature_c: float
    python: str
    runtime: str
    llama_cpp: str
    host: str
    memory_bytes_per_s: float
    flops: float
    page_round_trip_s: float
    page_bytes_per_s: float
    gpu_total_bytes: int
    gpu_free_bytes: int
    load: float
    disk_total_bytes: int
    disk_free_bytes: int
    def __init__(self, name: _Optional[str] = ..., system: _Optional[str] = ..., machine: _Optional[str] = ..., cpu: _Optional[str] = ..., cores_physical: _Optional[int] = ..., cores_logical: _Optional[int] = ..., threads: _Optional[int] = ..., cpu_quota: _Optional[float] = ..., memory_total_bytes: _Optional[int] = ..., memory_available_bytes: _Optional[int] = ..., memory_limit_bytes: _Optional[int] = ..., gpu: _Optional[str] = ..., battery_percent: _Optional[float] = ..., plugged: _Optional[bool] = ..., temperature_c: _Optional[float] = ..., python: _Optional[str] = ..., runtime: _Optional[str] = ..., llama_cpp: _Optional[str] = ..., host: _Optional[str] = ..., memory_bytes_per_s: _Optional[float] = ..., flops: _Optional[float] = ..., page_round_trip_s: _Optional[float] = ..., page_bytes_per_s: _Optional[float] = ..., gpu_total_bytes: _Optional[int] = ..., gpu_free_bytes: _Optional[int] = ..., load: _Optional[float] = ..., disk_total_bytes: _Optional[int] = ..., disk_free_bytes: _Optional[int] = ...) -> None: ...

class SessionState(_message.Message):
    __slots__ = ("session", "rank", "world_size", "slice", "memory_bytes", "pid", "share_bytes", "least_bytes", "most_bytes", "use")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SHARE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEAST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    USE_FIELD_NUMBER: _ClassVar[int]
    session: str
    rank: int
    world_size: int
    slice: str
    memory_bytes: int
    pid: int
    share_bytes: int
    least_bytes: int
    most_bytes: int
    use: float
    def __init__(self, session: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., slice: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., pid: _Optional[int] = ..., share_bytes: _Optional[int] = ..., least_bytes: _Optional[int] = ..., most_bytes: _Optional[int] = ..., use: _Optional[float] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("open", "connect", "load", "answer", "measure", "allreduce", "unload", "run", "time", "share")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CONNECT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    ALLREDUCE_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    open: Open
    connect: Connect
    load: Load
    answer: Answer
    measure: Measure
    allreduce: Allreduce
    unload: Unload
    run: Run
    time: Time
    share: MemoryShare
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., connect: _Optional[_Union[Connect, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., measure: _Optional[_Union[Measure, _Mapping]] = ..., allreduce: _Optional[_Union[Allreduce, _Mapping]] = ..., unload: _Optional[_Union[Unload, _Mapping]] = ..., run: _Optional[_Union[Run, _Mapping]] = ..., time: _Optional[_Union[Time, _Mapping]] = ..., share: _Optional[_Union[MemoryShare, _Mapping]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("opened", "connected", "loading", "loaded", "answered", "measured", "allreduced", "unloaded", "ran", "timed", "memory", "claim", "alive", "failed", "died")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    ALLREDUCED_FIELD_NUMBER: _ClassVar[int]
    UNLOADED_FIELD_NUMBER: _ClassVar[int]
    RAN_FIELD_NUMBER: _ClassVar[int]
    TIMED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    DIED_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    connected: Connected
    loading: Loading
    loaded: Loaded
    answered: Answered
    measured: Measured
    allreduced: Allreduced
    unloaded: Unloaded
    ran: Ran
    timed: Timed
    memory: MemoryUse
    claim: MemoryClaim
    alive: Alive
    failed: Failed
    died: Died
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., connected: _Optional[_Union[Connected, _Mapping]] = ..., loading: _Optional[_Union[Loading, _Mapping]] = ..., loaded: _Optional[_Union[Loaded, _Mapping]] = ..., answered: _Optional[_Union[Answered, _Mapping]] = ..., measured: _Optional[_Union[Measured, _Mapping]] = ..., allreduced: _Optional[_Union[Allreduced, _Mapping]] = ..., unloaded: _Optional[_Union[Unloaded, _Mapping]] = ..., ran: _Optional[_Union[Ran, _Mapping]] = ..., timed: _Optional[_Union[Timed, _Mapping]] = ..., memory: _Optional[_Union[MemoryUse, _Mapping]] = ..., claim: _Optional[_Union[MemoryClaim, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., died: _Optional[_Union[Died, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("rank", "world_size", "secret", "connect_timeout_s", "step_timeout_s", "send_timeout_s", "affinity", "streams")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    CONNECT_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    SEND_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    AFFINITY_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    world_size: int
    secret: bytes
    connect_timeout_s: float
    step_timeout_s: float
    send_timeout_s: float
    affinity: _containers.RepeatedScalarFieldContainer[int]
    streams: bool
    def __init__(self, rank: _Optional[int] = ..., world_size: _Optional[int] = ..., secret: _Optional[bytes] = ..., connect_timeout_s: _Optional[float] = ..., step_timeout_s: _Optional[float] = ..., send_timeout_s: _Optional[float] = ..., affinity: _Optional[_Iterable[int]] = ..., streams: _Optional[bool] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("session", "tcp_port", "pid", "addresses")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TCP_PORT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    session: str
    tcp_port: int
    pid: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session: _Optional[str] = ..., tcp_port: _Optional[int] = ..., pid: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class Connect(_message.Message):
    __slots__ = ("peers", "transport")
    PEERS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    transport: str
    def __init__(self, peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., transport: _Optional[str] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("rank", "name", "host", "port", "tcp_port", "session", "addresses")
    RANK_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    TCP_PORT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    name: str
    host: str
    port: int
    tcp_port: int
    session: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rank: _Optional[int] = ..., name: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., tcp_port: _Optional[int] = ..., session: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class Connected(_message.Message):
    __slots__ = ("links",)
    LINKS_FIELD_NUMBER: _ClassVar[int]
    links: _containers.RepeatedCompositeFieldContainer[LinkState]
    def __init__(self, links: _Optional[_Iterable[_Union[LinkState, _Mapping]]] = ...) -> None: ...

class LinkState(_message.Message):
    __slots__ = ("rank", "kind", "why", "round_trip_s", "bytes_per_s")
    RANK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    rank: int
    kind: str
    why: str
    round_trip_s: float
    bytes_per_s: float
    def __init__(self, rank: _Optional[int] = ..., kind: _Optional[str] = ..., why: _Optional[str] = ..., round_trip_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("slice", "path", "memory_limit_bytes", "stages", "options", "stage", "prefix_key", "prefix_folder", "prefix_bytes", "adapters", "adapter_paths", "encoder")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_KEY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FOLDER_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_PATHS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_FIELD_NUMBER: _ClassVar[int]
    slice: str
    path: str
    memory_limit_bytes: int
    stages: _containers.RepeatedScalarFieldContainer[int]
    options: EngineOptions
    stage: Stage
    prefix_key: bytes
    prefix_folder: str
    prefix_bytes: int
    adapters: _containers.RepeatedScalarFieldContainer[str]
    adapter_paths: _containers.RepeatedScalarFieldContainer[str]
    encoder: Encoder
    def __init__(self, slice: _Optional[str] = ..., path: _Optional[str] = ..., memory_limit_bytes: _Optional[int] = ..., stages: _Optional[_Iterable[int]] = ..., options: _Optional[_Union[EngineOptions, _Mapping]] = ..., stage: _Optional[_Union[Stage, _Mapping]] = ..., prefix_key: _Optional[bytes] = ..., prefix_folder: _Optional[str] = ..., prefix_bytes: _Optional[int] = ..., adapters: _Optional[_Iterable[str]] = ..., adapter_paths: _Optional[_Iterable[str]] = ..., encoder: _Optional[_Union[Encoder, _Mapping]] = ...) -> None: ...

class Encoder(_message.Message):
    __slots__ = ("text_model", "text_model_bytes", "text_model_path")
    TEXT_MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_MODEL_BYTES_FIELD_NUMBER: _ClassVar[int]
    TEXT_MODEL_PATH_FIELD_NUMBER: _ClassVar[int]
    text_model: str
    text_model_bytes: int
    text_model_path: str
    def __init__(self, text_model: _Optional[str] = ..., text_model_bytes: _Optional[int] = ..., text_model_path: _Optional[str] = ...) -> None: ...

class EngineOptions(_message.Message):
    __slots__ = ("context", "batch", "sequences", "outputs", "threads", "gpu_layers", "repack", "flash_attention", "kv_type", "memory", "reserved", "window", "io_threads", "io_chunk", "verify", "rollback")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    GPU_LAYERS_FIELD_NUMBER: _ClassVar[int]
    REPACK_FIELD_NUMBER: _ClassVar[int]
    FLASH_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    KV_TYPE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    IO_THREADS_FIELD_NUMBER: _ClassVar[int]
    IO_CHUNK_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    context: int
    batch: int
    sequences: int
    outputs: int
    threads: int
    gpu_layers: int
    repack: bool
    flash_attention: str
    kv_type: str
    memory: int
    reserved: int
    window: int
    io_threads: int
    io_chunk: int
    verify: bool
    rollback: int
    def __init__(self, context: _Optional[int] = ..., batch: _Optional[int] = ..., sequences: _Optional[int] = ..., outputs: _Optional[int] = ..., threads: _Optional[int] = ..., gpu_layers: _Optional[int] = ..., repack: _Optional[bool] = ..., flash_attention: _Optional[str] = ..., kv_type: _Optional[str] = ..., memory: _Optional[int] = ..., reserved: _Optional[int] = ..., window: _Optional[int] = ..., io_threads: _Optional[int] = ..., io_chunk: _Optional[int] = ..., verify: _Optional[bool] = ..., rollback: _Optional[int] = ...) -> None: ...

class Stage(_message.Message):
    __slots__ = ("takes", "gives", "threads", "provider")
    TAKES_FIELD_NUMBER: _ClassVar[int]
    GIVES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    takes: Boundary
    gives: Boundary
    threads: int
    provider: str
    def __init__(self, takes: _Optional[_Union[Boundary, _Mapping]] = ..., gives: _Optional[_Union[Boundary, _Mapping]] = ..., threads: _Optional[int] = ..., provider: _Optional[str] = ...) -> None: ...

class Boundary(_message.Message):
    __slots__ = ("tensors", "inner", "passed")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    INNER_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    inner: bool
    passed: int
    def __init__(self, tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., inner: _Optional[bool] = ..., passed: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "type", "shape", "open", "any_rank")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ANY_RANK_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    open: _containers.RepeatedScalarFieldContainer[int]
    any_rank: bool
    def __init__(self, name: _Optional[str] = ..., type: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., open: _Optional[_Iterable[int]] = ..., any_rank: _Optional[bool] = ...) -> None: ...

class Loading(_message.Message):
    __slots__ = ("fraction",)
    FRACTION_FIELD_NUMBER: _ClassVar[int]
    fraction: float
    def __init__(self, fraction: _Optional[float] = ...) -> None: ...

class Loaded(_message.Message):
    __slots__ = ("memory_bytes", "layers", "context", "load_s", "provider", "fell_back_from", "threads")
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    FELL_BACK_FROM_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    memory_bytes: int
    layers: int
    context: int
    load_s: float
    provider: str
    fell_back_from: _containers.RepeatedScalarFieldContainer[str]
    threads: int
    def __init__(self, memory_bytes: _Optional[int] = ..., layers: _Optional[int] = ..., context: _Optional[int] = ..., load_s: _Optional[float] = ..., provider: _Optional[str] = ..., fell_back_from: _Optional[_Iterable[str]] = ..., threads: _Optional[int] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("rank",)
    RANK_FIELD_NUMBER: _ClassVar[int]
    rank: int
    def __init__(self, rank: _Optional[int] = ...) -> None: ...

class Answered(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Measure(_message.Message):
    __slots__ = ("rank", "seconds")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    seconds: float
    def __init__(self, rank: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Measured(_message.Message):
    __slots__ = ("kind", "round_trip_median_s", "round_trip_p99_s", "round_trip_best_s", "send_bytes_per_s", "receive_bytes_per_s", "hints")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_MEDIAN_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_P99_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_BEST_S_FIELD_NUMBER: _ClassVar[int]
    SEND_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    round_trip_median_s: float
    round_trip_p99_s: float
    round_trip_best_s: float
    send_bytes_per_s: float
    receive_bytes_per_s: float
    hints: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[str] = ..., round_trip_median_s: _Optional[float] = ..., round_trip_p99_s: _Optional[float] = ..., round_trip_best_s: _Optional[float] = ..., send_bytes_per_s: _Optional[float] = ..., receive_bytes_per_s: _Optional[float] = ..., hints: _Optional[_Iterable[str]] = ...) -> None: ...

class Allreduce(_message.Message):
    __slots__ = ("n_floats", "algorithm", "wire", "repeats", "seed")
    N_FLOATS_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    n_floats: int
    algorithm: str
    wire: str
    repeats: int
    seed: int
    def __init__(self, n_floats: _Optional[int] = ..., algorithm: _Optional[str] = ..., wire: _Optional[str] = ..., repeats: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class Allreduced(_message.Message):
    __slots__ = ("algorithm", "median_s", "digest")
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_S_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    algorithm: str
    median_s: float
    digest: bytes
    def __init__(self, algorithm: _Optional[str] = ..., median_s: _Optional[float] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Unload(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Unloaded(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Run(_message.Message):
    __slots__ = ("wire", "algorithm")
    WIRE_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    wire: str
    algorithm: str
    def __init__(self, wire: _Optional[str] = ..., algorithm: _Optional[str] = ...) -> None: ...

class Ran(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Time(_message.Message):
    __slots__ = ("rows", "steps", "depth", "disk", "other_bytes", "most_s")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    OTHER_BYTES_FIELD_NUMBER: _ClassVar[int]
    MOST_S_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    steps: int
    depth: int
    disk: bool
    other_bytes: int
    most_s: float
    def __init__(self, rows: _Optional[_Iterable[int]] = ..., steps: _Optional[int] = ..., depth: _Optional[int] = ..., disk: _Optional[bool] = ..., other_bytes: _Optional[int] = ..., most_s: _Optional[float] = ...) -> None: ...

class Timed(_message.Message):
    __slots__ = ("step_s", "run_s", "disk_bytes_per_s", "busy")
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    RUN_S_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    step_s: _containers.RepeatedScalarFieldContainer[float]
    run_s: float
    disk_bytes_per_s: float
    busy: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, step_s: _Optional[_Iterable[float]] = ..., run_s: _Optional[float] = ..., disk_bytes_per_s: _Optional[float] = ..., busy: _Optional[_Iterable[bool]] = ...) -> None: ...

class Alive(_message.Message):
    __slots__ = ("leaving", "computed_s", "gpu_total_bytes", "gpu_free_bytes")
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_S_FIELD_NUMBER: _ClassVar[int]
    GPU_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    leaving: bool
    computed_s: float
    gpu_total_bytes: int
    gpu_free_bytes: int
    def __init__(self, leaving: _Optional[bool] = ..., computed_s: _Optional[float] = ..., gpu_total_bytes: _Optional[int] = ..., gpu_free_bytes: _Optional[int] = ...) -> None: ...

class MemoryShare(_message.Message):
    __slots__ = ("bytes", "coming", "number", "answers", "refused")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    COMING_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    coming: int
    number: int
    answers: bool
    refused: str
    def __init__(self, bytes: _Optional[int] = ..., coming: _Optional[int] = ..., number: _Optional[int] = ..., answers: _Optional[bool] = ..., refused: _Optional[str] = ...) -> None: ...

class MemoryClaim(_message.Message):
    __slots__ = ("least", "most")
    LEAST_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    least: int
    most: int
    def __init__(self, least: _Optional[int] = ..., most: _Optional[int] = ...) -> None: ...

class MemoryUse(_message.Message):
    __slots__ = ("resident", "seen", "computed_s")
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_S_FIELD_NUMBER: _ClassVar[int]
    resident: int
    seen: int
    computed_s: float
    def __init__(self, resident: _Optional[int] = ..., seen: _Optional[int] = ..., computed_s: _Optional[float] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("error", "message")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    error: str
    message: str
    def __init__(self, error: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Died(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class SliceOffer(_message.Message):
    __slots__ = ("slice", "n_bytes", "recipe")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    N_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECIPE_FIELD_NUMBER: _ClassVar[int]
    slice: str
    n_bytes: int
    recipe: bytes
    def __init__(self, slice: _Optional[str] = ..., n_bytes: _Optional[int] = ..., recipe: _Optional[bytes] = ...) -> None: ...

class SliceState(_message.Message):
    __slots__ = ("state", "held_bytes")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MISSING: _ClassVar[SliceState.State]
        READY: _ClassVar[SliceState.State]
        CUTTING: _ClassVar[SliceState.State]
        WAITING: _ClassVar[SliceState.State]
    MISSING: SliceState.State
    READY: SliceState.State
    CUTTING: SliceState.State
    WAITING: SliceState.State
    STATE_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    state: SliceState.State
    held_bytes: int
    def __init__(self, state: _Optional[_Union[SliceState.State, str]] = ..., held_bytes: _Optional[int] = ...) -> None: ...

class EnrollRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SigningRequest(_message.Message):
    __slots__ = ("csr_pem", "invitation_pem")
    CSR_PEM_FIELD_NUMBER: _ClassVar[int]
    INVITATION_PEM_FIELD_NUMBER: _ClassVar[int]
    csr_pem: bytes
    invitation_pem: bytes
    def __init__(self, csr_pem: _Optional[bytes] = ..., invitation_pem: _Optional[bytes] = ...) -> None: ...

class Certificate(_message.Message):
    __slots__ = ("certificate_pem", "refused")
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    certificate_pem: bytes
    refused: str
    def __init__(self, certificate_pem: _Optional[bytes] = ..., refused: _Optional[str] = ...) -> None: ...

class RevokedList(_message.Message):
    __slots__ = ("crl_pem",)
    CRL_PEM_FIELD_NUMBER: _ClassVar[int]
    crl_pem: bytes
    def __init__(self, crl_pem: _Optional[bytes] = ...) -> None: ...

class Installed(_message.Message):
    __slots__ = ("name", "crl_pem")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CRL_PEM_FIELD_NUMBER: _ClassVar[int]
    name: str
    crl_pem: bytes
    def __init__(self, name: _Optional[str] = ..., crl_pem: _Optional[bytes] = ...) -> None: ...
