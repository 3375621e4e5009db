"""Error texts once a model runs: compiling, memory, strategies, input, TensorBoard.

Patterns stand from the particular to the general; symptoms.py takes the first that fits. Each
text was met: on this project's machines, or by the users whose reports `source` names.
"""

from colabtpu.catalogue import RESTART, Symptom

_MEASURED = "TensorFlow 2.20, on 4 CPU devices"

COMPILING = (
    Symptom(
        "op-not-on-tpu", "Detected unsupported operations ... on XLA_TPU_JIT: PyFunc",
        r"OpKernel for XLA_TPU_JIT|unsupported operations when trying to compile .*XLA_TPU_JIT",
        "The model uses an operation that the TPU compiler does not have.",
        "Rewrite that operation, or move it into the input pipeline, which runs on the host",
        "keras#15317, keras_cv_attention_models#8",
    ),
    Symptom(
        "jax-op-not-on-tpu", "MLIR translation rule for primitive 'eig' not found for platform tpu",
        r"MLIR translation rule for primitive '\w+' not found for platform tpu",
        "That operation exists on the CPU alone.",
        "Rewrite it, or run it on the host with jax.pure_callback",
        "JAX on libtpu's compiler",
    ),
    Symptom(
        "dynamic-shape", "Dynamic concatenation is not supported yet",
        r"Dynamic (concatenation is|shape is) not supported|TPU has inputs with dynamic shapes",
        "A shape changes from batch to batch: usually the last, smaller batch.",
        "dataset.batch(n, drop_remainder=True), and pad every row to one length",
        "tensorflow#36194, colabtools#1491",
    ),
    Symptom(
        "batch-not-divisible", "the global size of its dimension 0 should be divisible by 8",
        r"global size of its dimension 0 should be divisible by \d+",
        "The batch cannot be shared out evenly among the devices.",
        "Take a multiple of the devices: batch_size=tpu.batch_size(per_core=...), and drop the "
        "remainder",
        "Keras 3.15 on JAX, 8 devices",
    ),
    Symptom(
        "pure-eager-run", "TPUStrategy.run(fn, ...) does not support pure eager execution",
        r"does not support pure eager execution",
        "strategy.run() was called outside a tf.function.",
        "Put @tf.function on the function that calls strategy.run(), or use fit()",
        "tensorflow#41074",
    ),
    Symptom(
        "out-of-vmem", "Ran out of memory in memory space vmem",
        r"memory space (vmem|smem)|ScopedVmemOom",
        "A kernel (attention, mostly) needs more of the chip's small on-chip memory than there is.",
        "Take smaller block sizes for that kernel, or switch it off; the batch size plays no part",
        "pytorch/xla#9524, vllm#8318",
    ),
    Symptom(
        "slow-first-step", "TPU Execute is taking a long time. This might be due to a deadlock",
        r"TPU Execute is taking a long time",
        "One step takes minutes: a huge program, or devices that wait for each other because they "
        "run different programs.",
        "Wait for the first step; if it never ends, look for code that runs on one replica only",
        "huggingface/diffusers#856, colabtools#3952",
    ),
)  # fmt: skip

MEMORY = (
    Symptom(
        "out-of-hbm-compiling", "Ran out of memory in memory space hbm. Used 9.08G of 7.48G hbm.",
        r"[Rr]an out of memory (in memory space hbm|on HBM)|CompileTimeHbmOom",
        "The compiled step needs more memory than one device has; the host's memory does not "
        "count.",
        "Halve the per-core batch and accumulate gradients, or shorten the rows; "
        "colabtpu.preflight.largest_batch() finds the one that fits",
        "ColabFold#62, EasyDeL#78, libtpu 0.0.52",
    ),
    Symptom(
        "out-of-hbm-running", "Attempting to allocate 50.00M. ... 27.86M free.; (0x0x0_HBM0)",
        r"\(0x0x0_HBM\d+\)|RuntimeBufferAllocationFailure",
        "The device is full: what earlier cells left there counts as well.",
        f"{RESTART} if cells were run twice; else a smaller batch, or a sharded model",
        "huggingface/diffusers#8358, levanter#1235",
    ),
    Symptom(
        "tensor-proto-2gb", "Cannot create a tensor proto whose content is larger than 2GB.",
        r"Cannot create a tensor proto whose content is larger than 2GB",
        "A whole data set went into the graph as one constant.",
        "Feed it in batches: tf.data from files or a generator, or colabtpu.data",
        "tensorflow#47026",
    ),
)  # fmt: skip

STRATEGIES = (
    Symptom(
        "steps-per-execution", "You must feed a value for placeholder tensor 'while/.../cond/...'",
        r"You must feed a value for placeholder tensor '[^']*while/[^']*cond",
        "Keras 3 under a TensorFlow strategy fails with steps_per_execution > 1.",
        "compile(..., steps_per_execution=1), or take the JAX engine",
        f"Keras 3.15, {_MEASURED}; keras#19246",
    ),
    Symptom(
        "merge-call-in-graph", "`merge_call` called while defining a new graph or a tf.function.",
        r"`merge_call` called while defining a new graph or a tf\.function",
        "Keras 3 under a TensorFlow strategy fails with gradient_accumulation_steps and with "
        "ema_overwrite_frequency.",
        "Remove that option of the optimizer, or take the JAX engine, where both work",
        f"Keras 3.15, {_MEASURED}",
    ),
    Symptom(
        "jit-under-a-strategy", "Trying to access resource ... located in device ... from device",
        r"Trying to access resource .* located in device .* from device",
        "jit_compile=True under a strategy compiles for one device and meets variables of another.",
        "compile(..., jit_compile=False) inside the scope",
        f"Keras 3.15, {_MEASURED}",
    ),
    Symptom(
        "strategies-mixed", "Mixing different tf.distribute.Strategy objects",
        r"Mixing different tf\.distribute\.Strategy objects",
        "The model was made in one scope, its optimizer or compile() in another or in none.",
        "Make, compile and load the model inside one `with tpu.scope():`",
        f"Keras 3.15, {_MEASURED}",
    ),
    Symptom(
        "outside-the-scope", 'Need to be inside "with strategy.scope()"',
        r"Need to be inside \"with strategy\.scope\(\)\"|not created in the distribution strategy",
        "The model was made outside the strategy's scope.",
        "Make, compile and load the model inside `with tpu.scope():`",
        f"Keras 3.15, {_MEASURED}",
    ),
    Symptom(
        "xla-replication", "Cannot replicate if number of devices (1) is different from 8",
        r"Cannot replicate if number of devices \(\d+\) is different from \d+",
        "PyTorch/XLA: the device was opened outside the process that xmp.spawn() started.",
        "Call xm.xla_device() inside the spawned function only",
        "pytorch/xla, Lightning",
    ),
)  # fmt: skip

INPUT = (
    Symptom(
        "local-file-system", "UnimplementedError: File system scheme '[local]' not implemented",
        r"File system scheme '\[local\]' not implemented",
        "A TPU Node cannot read this machine's disk. A TPU that is attached to it can.",
        "Connect to the attached TPU: colabtpu.connect(); else read from gs://",
        "tensorflow#49177, keras-tuner#921",
    ),
    Symptom(
        "bucket-not-permitted", "gserviceaccount.com does not have storage.objects.list access",
        r"gserviceaccount\.com does not have storage\.objects",
        "The TPU's service account may not read that bucket.",
        "Grant it storage.objectViewer, or read the data here: an attached TPU needs no bucket",
        "keras-tuner#921",
    ),
    Symptom(
        "py-function-on-the-worker", "No registered 'PyFunc' OpKernel for CPU devices",
        r"No registered 'PyFunc' OpKernel",
        "from_generator and py_function run Python, and a TPU Node has no Python.",
        "Connect to the attached TPU: colabtpu.connect(); or write the data to files first",
        "tensorflow#24099, #39030",
    ),
    Symptom(
        "drive-gone", "OSError: [Errno 107] Transport endpoint is not connected",
        r"Transport endpoint is not connected",
        "Google Drive was unmounted, as happens after hours.",
        "drive.mount('/content/drive', force_remount=True); train from /content, and only save "
        "to Drive",
        "colabtools#5641, #3441",
    ),
    Symptom(
        "worker-gone", "UnavailableError: Socket closed",
        r"(Unavailable\w*|UNAVAILABLE).*(Socket closed|failed to connect to all addresses)",
        "The TPU's worker ended: out of memory mostly, or preempted.",
        f"{RESTART}, take a smaller batch and less caching, and resume from the last checkpoint",
        "tensorflow#36996, colabtools#1886",
    ),
)  # fmt: skip

TENSORBOARD = (
    Symptom(
        "tensorboard-403", "403. That's an error. That's all we know.",
        r"403\. That.s an error",
        "The browser blocks third-party cookies, or the window is incognito, and Colab's proxy "
        "needs a service worker.",
        "Allow cookies for [*.]googleusercontent.com, in a normal window; or download the logs",
        "tensorboard#3186, colabtools#1577",
    ),
    Symptom(
        "service-worker", "Failed to register a ServiceWorker",
        r"Failed to register a ServiceWorker",
        "The browser blocks service workers: third-party cookies off, or an incognito window.",
        "Allow cookies for [*.]googleusercontent.com, in a normal window",
        "colabtools#17, tensorboard#4993",
    ),
    Symptom(
        "tensorboard-port", "TensorBoard could not bind to port 6006, it was already in use",
        r"TensorBoard could not bind to port \d+",
        "An earlier TensorBoard, or something else, has the port.",
        "colabtpu.monitor.tensorboard(logdir) takes a free one; or %tensorboard --port 0",
        "TensorBoard 2.20",
    ),
    Symptom(
        "tensorboard-reused", "Reusing TensorBoard on port 6006 (pid 228), started 0:00:07 ago.",
        r"Reusing TensorBoard on port \d+",
        "TensorBoard found the note of an earlier instance and did not check that it is alive.",
        "If the frame stays blank: !rm -rf /tmp/.tensorboard-info, and start it again",
        "tensorboard#3186",
    ),
    Symptom(
        "no-trace-event", "No trace event is collected after 4 attempt(s).",
        r"No trace event (is|was) collected",
        "Nothing ran on the device while the profiler was listening.",
        "Start the capture while fit() is in the middle of an epoch, and for longer",
        "openxla/xprof#380",
    ),
    Symptom(
        "no-profile-data", "No profile data was found",
        r"No profile data was found",
        "The profile plugin is xprof now, and it looks for <logdir>/plugins/profile/*/*.xplane.pb.",
        "pip install xprof; give it the folder above `plugins` (Keras writes <logdir>/train)",
        "tensorboard#6957",
    ),
)  # fmt: skip
