"""Error texts on the way to a TPU: connecting, wrong wheels, code of other years.

Patterns stand from the particular to the general; symptoms.py takes the first that fits. Each
text was met: on this project's machines, or by the users whose reports `source` names.
"""

from colabtpu.catalogue import INSTALL, RESTART, Symptom

_TF_INSTALL = f"{INSTALL} --engine tensorflow, then {RESTART}"
_FRESH = f"{RESTART}, and call colabtpu.connect() first"
_MEASURED = "TensorFlow 2.20, on a machine without a chip"

CONNECTING = (
    Symptom(
        "tpu-name-missing", "ValueError: Please provide a TPU Name to connect to.",
        r"Please provide a TPU Name to connect to",
        "TPUClusterResolver() without an argument, or with '', looks for a TPU Node; those ended, "
        "and today's TPU is attached to this machine.",
        "TPUClusterResolver(tpu='local'), or colabtpu.connect()",
        "colabtools#4637, #4686, #4699",
    ),
    Symptom(
        "stock-tensorflow",
        "No OpKernel was registered to support Op 'ConfigureDistributedTPU'",
        r"No OpKernel was registered to support Op 'ConfigureDistributedTPU'",
        "This is stock TensorFlow, which has no TPU kernels; TPU support is in tensorflow-tpu.",
        _TF_INSTALL,
        "tensorflow#96203, colabtools#5203",
    ),
    Symptom(
        "tpu-library-off", "No matching devices found for '/device:TPU_SYSTEM:0'",
        r"No matching devices found for '/device:TPU_SYSTEM:0'",
        "TensorFlow has TPU kernels, but libtpu was not loaded: TPU_LOAD_LIBRARY=0 is set, or "
        "libtpu is missing.",
        f"del os.environ['TPU_LOAD_LIBRARY'], then {RESTART}",
        _MEASURED,
    ),
    Symptom(
        "worker-without-a-tpu", "TPUs not found in the cluster. ... TPU_SYSTEM:0 unknown device",
        r"TPU_SYSTEM:0 unknown device",
        "The address answers, but the TensorFlow worker there has no TPU.",
        "Check the address; for the TPU of this machine leave it out: colabtpu.connect()",
        _MEASURED,
    ),
    Symptom(
        "no-platform-without-pjrt", "RET_CHECK failure (.../tpu_node_interfaces.cc:432) *platform",
        r"RET_CHECK failure \(.*tpu_node_interfaces\.cc:\d+\) \*platform",
        "libtpu found no chip that TensorFlow can open in its old way; v5e, v5p and v6e are "
        "opened through PJRT, whose variables must be set before TensorFlow is imported.",
        _FRESH,
        _MEASURED,
    ),
    Symptom(
        "no-tpu-platform", "No TPU platform found. Platform manager status: OK",
        r"No TPU platform (found|registered)",
        "TensorFlow tried its old way to the TPU, which newer libtpu and v5e, v5p, v6e lack.",
        f"{_FRESH}; or take the JAX engine: connect(engine='jax')",
        "Kaggle/docker-python#1499, tensorflow#90807",
    ),
    Symptom(
        "strategy-before-the-tpu-is-initialised",
        "IndexError: index 0 is out of bounds for axis 0 with size 0",
        r"index 0 is out of bounds for axis 0 with size 0",
        "TPUStrategy found no initialised TPU: initialize_tpu_system() was not called, or its "
        "error was swallowed by a try/except.",
        "Resolver, then initialize_tpu_system(), then TPUStrategy; colabtpu.connect() does so",
        _MEASURED, frames=r"tpu_strategy\.py",
    ),
    Symptom(
        "tpu-not-initialised", "FailedPreconditionError: The TPU system has not been initialized.",
        r"The TPU system has not been initialized",
        "Something ran on the TPU before it was initialised, or after its worker was restarted.",
        f"{RESTART}; resolver, then initialize_tpu_system(), then TPUStrategy",
        "tensorflow#43707, pytorch/xla#3113",
    ),
    Symptom(
        "tpu-initialised-twice", "TPU system local has already been initialized. Reinitializing...",
        r"TPU system .* has already been initialized\. Reinitializing the TPU",
        "The TPU was initialised a second time; models made before have lost their weights.",
        f"{RESTART}, and initialise once; colabtpu.connect() keeps one connection",
        "tensorflow#36996",
    ),
    Symptom(
        "tpu-in-use", "The TPU is already in use by process with pid 7890.",
        r"The TPU is already in use by (process with pid|another process)",
        "A TPU belongs to one process at a time; that process, often another notebook or one "
        "that was not shut down, has it.",
        "End that process (`kill` the pid that is named, or shut the other kernel down)",
        "JAX and libtpu; several reports",
    ),
    Symptom(
        "tpu-device-busy", "open(/dev/vfio/0): Device or resource busy",
        r"(open\(|open device: |iommu group )/dev/(vfio/|accel)\d+.*(Device or resource busy|busy)",
        "Another process, or a child of an earlier run, still has the chip open.",
        "`python -m colabtpu doctor` names the process; end it, or restart the runtime",
        "marin-community/marin#4783",
    ),
    Symptom(
        "tpu-device-not-permitted", "open(/dev/accel0): Operation not permitted",
        r"(open\(|Couldn't open device: )/dev/(vfio/|accel)\d+.*Operation not permitted",
        "Several processes try to open the chip, as a launcher that starts one process a core "
        "does, or this container was not given the device.",
        "One process should own the TPU: call fit() from the notebook itself, without a launcher",
        "huggingface/accelerate#2893, pytorch/xla#3165",
    ),
    Symptom(
        "libtpu-lock-file", "Internal error when accessing libtpu multi-process lockfile.",
        r"Internal error when accessing libtpu multi-process lockfile",
        "The lock file of libtpu is held, or belongs to another user.",
        "End the other process that uses libtpu; if there is none: rm /tmp/libtpu_lockfile",
        "libtpu 0.0.52, two compilations at once",
    ),
    Symptom(
        "no-tpu-device", "TPU initialization failed: No ba16c7433 device found.",
        r"No ba16c7433 device found",
        "libtpu loads, but there is no chip, or one that this libtpu does not know yet.",
        "Colab: Runtime > Change runtime type > v5e-1 TPU. On a TPU: take a newer libtpu and jax",
        "JAX 0.7.2 without a chip; reports on v6e and v7x",
    ),
    Symptom(
        "metadata-server", "Failed to get TPU metadata (tpu-env) from instance metadata",
        r"Failed to get TPU metadata \(tpu-env\)",
        "libtpu asks Google Cloud's metadata server, which is not there, again and again.",
        "os.environ['TPU_SKIP_MDS_QUERY'] = '1' before the first import; connect() sets it",
        "google/gvisor#10795, jax#11668",
    ),
    Symptom(
        "worker-hostnames", "unexpected worker hostname 'WARNING: could not determine TPU worker'",
        r"unexpected worker hostname 'WARNING",
        "TPU_WORKER_HOSTNAMES holds a warning instead of a host name: a metadata query failed. "
        "On one machine the variable is not needed.",
        "os.environ['TPU_WORKER_HOSTNAMES'] = 'localhost' before the first import",
        "libtpu 0.0.21.1; Kaggle v5e-8 users",
    ),
    Symptom(
        "worker-addresses", "slice_builder_worker_addresses specified. Expected 4 worker addresses",
        r"slice_builder_worker_addresses specified\. Expected \d+ worker addresses, got \d+",
        "TPU_PROCESS_ADDRESSES, which Kaggle's image sets to 'local', confuses this libtpu.",
        f"os.environ.pop('TPU_PROCESS_ADDRESSES') before the first import; {RESTART} if too late",
        "huggingface/transformers#28204",
    ),
    Symptom(
        "tpu-name-asks-the-cloud", "URLError: <urlopen error [Errno -2] Name or service not known>",
        r"URLError|urlopen error",
        "TPU_NAME is set (to 'local', or to nothing), so TensorFlow looks a TPU up at Google "
        "Cloud instead of using the one that is attached.",
        "os.environ.pop('TPU_NAME'), then TPUClusterResolver(tpu='local')",
        _MEASURED, frames=r"tpu_cluster_resolver\.py|tpu/client/client\.py",
    ),
    Symptom(
        "cloud-tpu-client-missing", "Missing runtime dependency on the Google API client.",
        r"Missing runtime dependency on the Google API client",
        "A TPU name was given, so TensorFlow looks it up at Google Cloud. A TPU attached to this "
        "machine has no name.",
        "TPUClusterResolver(tpu='local'), or colabtpu.connect()",
        _MEASURED,
    ),
    Symptom(
        "cloud-lookup-failed", "Could not lookup TPU metadata from name 'my-tpu'.",
        r"Could not lookup TPU metadata from name",
        "No TPU Node of that name exists in the project and zone; TPU Nodes ended in April 2025.",
        "TPUClusterResolver(tpu='local') on the TPU VM itself",
        "TensorFlow 2.20, tpu/client/client.py",
    ),
    Symptom(
        "several-tpus", "Using multiple TPUs in a single session is not yet implemented",
        r"Using multiple TPUs in a single session is not yet implemented",
        "TPUClusterResolver takes one TPU; a slice of several hosts has one name.",
        "Give one address, or tpu='local'",
        _MEASURED,
    ),
    Symptom(
        "empty-tpu-list", "ValueError: At least one TPU must be specified.",
        r"At least one TPU must be specified",
        "TPUClusterResolver was given an empty list of addresses.",
        "TPUClusterResolver(tpu='local'), or colabtpu.connect()",
        _MEASURED,
    ),
    Symptom(
        "connect-to-host", "ValueError: Must provide at least one remote_host",
        r"Must provide at least one remote_host",
        "experimental_connect_to_host is for a worker of another machine; a local TPU has none.",
        "Leave the call out; with tpu='local' nothing needs connecting",
        _MEASURED,
    ),
    Symptom(
        "colab-tpu-addr", "KeyError: 'COLAB_TPU_ADDR'",
        r"KeyError: 'COLAB_TPU_ADDR'",
        "Colab set that variable for TPU Nodes, which ended in 2024.",
        "colabtpu.connect(); `python -m colabtpu migrate NOTEBOOK` rewrites the whole cell",
        "notebooks of 2018 to 2022",
    ),
    Symptom(
        "worker-of-another-tensorflow", "'__inference__tpu_init_fn_4' is neither a type of a...",
        r"'__inference__tpu_init_fn_\d+' is neither a type of a primitive operation",
        "The TensorFlow here and the one on the TPU Node are of different releases.",
        "Use the TPU that is attached to this machine: colabtpu.connect()",
        "tensorflow#35700, #43037",
    ),
    Symptom(
        "legacy-tpu-driver", "Requested backend tpu_driver, but it failed to initialize",
        r"backend '?tpu_driver'?, but it failed|Failed to open the gRPC driver",
        "JAX was told to reach a TPU Node; those ended, and JAX no longer has that driver.",
        "Remove jax.tools.colab_tpu and JAX_XLA_BACKEND; jax finds the attached TPU by itself",
        "google-research/vision_transformer#146, KoboldAI#141",
    ),
    Symptom(
        "setup-tpu", "jax.tools.colab_tpu.setup_tpu() was required for older JAX versions",
        r"jax\.tools\.colab_tpu\.setup_tpu\(\) was required for older JAX versions",
        "That call belongs to the TPU Nodes of the past.",
        "Delete the call; jax finds the attached TPU by itself",
        "JAX 0.7.2",
    ),
    Symptom(
        "jax-without-tpu-support", "A Google TPU may be present on this machine, but either a...",
        r"A Google TPU may be present on this machine, but either a TPU-enabled jaxlib or libtpu",
        "JAX runs on the CPU, because libtpu is missing or does not fit.",
        f"{INSTALL} --engine jax, then {RESTART}",
        "jax#29989",
    ),
    Symptom(
        "no-tpu-free", "Failed to assign a backend. No backend with TPU available.",
        r"No backend with TPU available",
        "Colab has no TPU free at the moment, on paid plans too.",
        "Try later or take a GPU runtime; the same notebook runs there",
        "colabtools#5108, #4126, #5532",
    ),
)  # fmt: skip

VERSIONS = (
    Symptom(
        "tensorflow-absent", "ModuleNotFoundError: No module named 'tensorflow'",
        r"No module named 'tensorflow'",
        "TensorFlow is not installed; Colab's TPU image has had none since March 2025. Keras "
        "asks for it unless KERAS_BACKEND says otherwise.",
        f"{INSTALL} --engine tensorflow; or, before keras is imported, "
        "os.environ['KERAS_BACKEND'] = 'jax', which connect(engine='jax') does",
        "colabtools#5164, #5174",
    ),
    Symptom(
        "keras-backend-unknown", "ValueError: Unable to import backend : torchx",
        r"Unable to import backend : ",
        "KERAS_BACKEND or ~/.keras/keras.json names a backend that Keras does not have.",
        "os.environ['KERAS_BACKEND'] = 'tensorflow' or 'jax'",
        "Keras 3.15",
    ),
    Symptom(
        "libtpu-too-new", "ConfigureDistributedTpuOp_DoWork not available in this library.",
        r"\w*(Tpu|TPU)\w* not available in this library",
        "This libtpu lacks functions that tensorflow-tpu 2.20.0 calls, and the process aborts; "
        "0.0.14 to 0.0.30 have them.",
        f'pip install "libtpu>=0.0.14,<=0.0.30", then {RESTART}',
        "tensorflow-tpu 2.20.0 with libtpu 0.0.10, 0.0.36, 0.0.43.2, 0.0.52",
    ),
    Symptom(
        "libtpu-not-on-pypi", "tensorflow-tpu 2.18.0 depends on libtpu==2.18.0",
        r"tensorflow-tpu 2\.1[5-8]\.\d+ depends on libtpu|libtpu==2\.1[5-8]\.",
        "The libtpu of those old wheels is not on PyPI.",
        f"Take 2.20.0: {_TF_INSTALL}",
        "colabtools#5209",
    ),
    Symptom(
        "pjrt-versions-differ", "Unexpected PJRT_Plugin_Attributes_Args size: expected 32, got 24",
        r"Unexpected PJRT_\w+_Args size|Mismatched PJRT plugin PJRT API version",
        "libtpu and the framework (jax, torch_xla, TensorFlow) are of different years.",
        f"Install a pair that was released together: {INSTALL}, then {RESTART}",
        "google-deepmind/weathernext#185, pytorch/xla#6949",
    ),
    Symptom(
        "libtpu-of-another-index", "module 'libtpu' has no attribute 'get_library_path'",
        r"module 'libtpu' has no attribute 'get_library_path'",
        "A libtpu from the find-links index of old TensorFlow releases has replaced the one that "
        "jax needs.",
        f'pip install --force-reinstall "libtpu>=0.0.14,<=0.0.30", then {RESTART}',
        "jax#29989",
    ),
    Symptom(
        "no-xla-on-the-host", "could not find registered transfer manager for platform Host",
        r"could not find registered transfer manager for platform Host",
        "tensorflow-tpu cannot compile for the CPU, and Keras asked for that: the model was made "
        "outside strategy.scope(), or jit_compile=True was set.",
        "Make and compile the model inside tpu.scope(), or compile(..., jit_compile=False)",
        "keras-team/tf-keras#834, tensorflow#61976",
    ),
    Symptom(
        "tensorflow-text-of-another-release", "_regex_split_ops.so: undefined symbol",
        r"tensorflow_text/.*\.so: undefined symbol",
        "tensorflow-text was built for another TensorFlow.",
        f"pip uninstall -y tensorflow-text, then {_TF_INSTALL}",
        "keras-hub#2159, tensorflow/text#961",
    ),
    Symptom(
        "transformers-wants-keras-2", "Keras 3, but this is not yet supported in Transformers",
        r"installed version of Keras is Keras 3, but this is not yet supported in Transformers",
        "The TensorFlow models of transformers need Keras 2; transformers 5 has none any more.",
        "Load the model with keras_hub.models.*.from_preset('hf://...'); see the fine-tuning "
        "notebook",
        "huggingface/transformers#36410, #34761",
    ),
    Symptom(
        "transformers-without-tensorflow",
        "cannot import name 'TFAutoModelForCausalLM' from 'transformers'",
        r"cannot import name '(TF\w+|create_optimizer|KerasMetricCallback)' from 'transformers'",
        "transformers 5 has dropped TensorFlow.",
        "Load the model with keras_hub.models.*.from_preset('hf://...')",
        "transformers 5",
    ),
    Symptom(
        "pkg-resources-gone", "ModuleNotFoundError: No module named 'pkg_resources'",
        r"No module named 'pkg_resources'",
        "setuptools 82 removed it; TensorBoard 2.20 still imports it.",
        'pip install "setuptools<82"',
        "TensorBoard 2.20",
    ),
    Symptom(
        "importlib-resources-missing", "ModuleNotFoundError: No module named 'importlib_resources'",
        r"No module named 'importlib_resources'",
        "tensorflow-datasets imports it and does not say so in its metadata.",
        "pip install importlib_resources",
        "tensorflow-datasets 4.9.10",
    ),
)  # fmt: skip

OLD_CODE = (
    Symptom(
        "tf-contrib", "AttributeError: module 'tensorflow' has no attribute 'contrib'",
        r"module 'tensorflow' has no attribute 'contrib'",
        "tf.contrib ended with TensorFlow 1; keras_to_tpu_model with it.",
        "`python -m colabtpu migrate NOTEBOOK` says line by line what to write instead",
        _MEASURED,
    ),
    Symptom(
        "tensorflow-1-name", "AttributeError: module 'tensorflow' has no attribute 'Session'",
        r"module 'tensorflow(\._api\.v2\.train)?' has no attribute "
        r"'(Session|placeholder|AdamOptimizer|GradientDescentOptimizer|app|flags|estimator)'"
        r"|has no attribute 'make_one_shot_iterator'",
        "The code is for TensorFlow 1.",
        "`python -m colabtpu migrate NOTEBOOK`; or rewrite it with model.fit",
        _MEASURED,
    ),
    Symptom(
        "tpu-estimator", "module 'tensorflow._api.v2.compat.v1' has no attribute 'estimator'",
        r"has no attribute 'estimator'",
        "TPUEstimator went with TensorFlow 2.16.",
        "Rewrite with a Keras model and fit() inside tpu.scope()",
        _MEASURED,
    ),
    Symptom(
        "mixed-precision-experimental", "module 'keras.mixed_precision' has no attribute",
        r"mixed_precision' has no attribute '(experimental|set_policy)'",
        "mixed_precision.experimental moved in TensorFlow 2.4.",
        "keras.mixed_precision.set_global_policy('mixed_bfloat16')",
        _MEASURED,
    ),
    Symptom(
        "optimizer-argument-renamed", "ValueError: Argument(s) not recognized: {'lr': 0.1}",
        r"Argument\(s\) not recognized: \{'(lr|decay|epsilon_hat)'",
        "Keras 3 optimizers take learning_rate, and a schedule instead of decay.",
        "Adam(learning_rate=...)",
        "Keras 3.15",
    ),
    Symptom(
        "experimental-steps-per-execution",
        "compile() got an unexpected keyword argument 'experimental_steps_per_execution'",
        r"unexpected keyword argument 'experimental_steps_per_execution'",
        "It is called steps_per_execution now, and fails with Keras 3 under a strategy.",
        "Leave it out",
        "Keras 3.15",
    ),
    Symptom(
        "fit-generator", "'Sequential' object has no attribute 'fit_generator'",
        r"has no attribute '(fit|predict|evaluate)_generator'",
        "fit() takes generators itself.",
        "model.fit(generator)",
        "Keras 3.15",
    ),
    Symptom(
        "save-without-extension", "Invalid filepath extension for saving.",
        r"Invalid filepath extension for saving",
        "Keras 3 saves to one file that ends in .keras; export() writes a SavedModel.",
        "model.save('model.keras')",
        "Keras 3.15",
    ),
    Symptom(
        "weights-file-name", "The filename must end in `.weights.h5`.",
        r"The filename must end in `\.weights\.h5`",
        "Keras 3 wants that ending for weights.",
        "model.save_weights('model.weights.h5')",
        "Keras 3.15",
    ),
    Symptom(
        "saved-model-not-loadable", "Keras 3 only supports V3 `.keras` files, legacy H5...",
        r"File format not supported: .*Keras 3 only supports",
        "That is a SavedModel directory, or no model at all.",
        "keras.layers.TFSMLayer(path, call_endpoint='serving_default') for inference; else load "
        "it with tf_keras and save it as .keras",
        "Keras 3.15",
    ),
    Symptom(
        "optimizer-not-built", "`set_weights()` on an optimizer that has not yet been built",
        r"`set_weights\(\)` on an optimizer that has not yet been built",
        "The optimizer has no variables before its first step.",
        "optimizer.build(model.trainable_variables) inside the scope; or save and load the whole "
        "model as .keras",
        "tensorflow#55228, Keras 3.15",
    ),
    Symptom(
        "flash-attention-on-tensorflow", "Flash attention is not supported in tensorflow backend.",
        r"Flash attention is not supported in tensorflow backend",
        "Keras has flash attention on JAX and PyTorch only.",
        "keras.config.disable_flash_attention(), or the JAX engine",
        "Keras 3.15",
    ),
)  # fmt: skip
