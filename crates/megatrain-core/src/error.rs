//! Everything that can go wrong in the core, each variant naming a condition and carrying its numbers.
use std::path::PathBuf;

pub use self::budget::{Item, Size, Tier};
use self::budget::{sum_of_shared_memory, sum_that_does_not_fit};
pub use self::disk::DiskError;

mod budget;
mod disk;

/// A range as a message shows it.
fn range(least: u64, most: Option<u64>, why: &str) -> String {
    let limits = match most {
        None => format!("at least {least}"),
        Some(most) if least == 0 => format!("at most {most}"),
        Some(most) => format!("at least {least} and at most {most}"),
    };
    if why.is_empty() { limits } else { format!("{limits} ({why})") }
}

/// The error type of the whole core.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // ---- Memory, devices and threads ----
    /// A plan needs more than a tier offers. Nothing was allocated.
    #[error("{}", sum_that_does_not_fit(*tier, *needed, *available, items))]
    DoesNotFit {
        /// The tier that is too small.
        tier: Tier,
        /// The sum of the items on that tier, in bytes.
        needed: u64,
        /// The budget of that tier, in bytes.
        available: u64,
        /// Every line of the sum.
        items: Vec<Item>,
    },
    /// Device and host share one memory, and a plan needs more than there is. Nothing was allocated.
    #[error("{}", sum_of_shared_memory(*needed, *available, items))]
    SharedMemory {
        /// The sum of all items, in bytes.
        needed: u64,
        /// The budget of both tiers together, in bytes.
        available: u64,
        /// Every line of the sum.
        items: Vec<Item>,
    },
    /// The operating system refused host memory.
    #[error("host memory: {call} of {} failed: {source}", Size(*bytes as u64))]
    HostMemory {
        /// The system call.
        call: &'static str,
        /// The bytes asked for.
        bytes: usize,
        /// The system's error.
        source: std::io::Error,
    },
    /// A device call failed.
    #[error("device call {call} failed with code {code}: {detail}")]
    Device {
        /// The driver call.
        call: &'static str,
        /// The driver's code.
        code: i32,
        /// The driver's message, or ours.
        detail: String,
    },
    /// No usable device; the reason and the remedy are in the message.
    #[error("{reason}")]
    NoDevice {
        /// What is missing and what to install.
        reason: String,
    },
    /// A thread of the optimizer's pool failed.
    #[error("an optimizer thread failed: {0}")]
    Worker(String),

    // ---- Disks ----
    /// A file could not be written.
    #[error("{path} cannot be written: {source} ({} failed; {needed} bytes were needed, {free} are free)", error.action(), path = error.path.display(), source = error.source)]
    Storage {
        /// Bytes that it takes, with all others that were to be written beside it.
        needed: u64,
        /// Bytes free on its disk.
        free: u64,
        /// The call that failed.
        error: DiskError,
    },
    /// A folder for state files, or a file in it, cannot be used.
    #[error("{path} {what}: {source}; name another folder as memory.nvme.path", path = path.display())]
    StateFolder {
        /// The folder or file.
        path: PathBuf,
        /// What cannot be done.
        what: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// The plan has state or layer inputs on disk, and no folder was named for it.
    #[error(
        "the plan keeps optimizer state or layer inputs on disk, and no folder for it was named (memory.nvme.path)"
    )]
    NoStateFolder,
    /// A disk has no room for a state file.
    #[error("{path} needs {needed} bytes for what the plan keeps on disk, which its disk does not have; lower memory.nvme.size, free some space, or name more folders as memory.nvme.path", path = path.display())]
    StateFilesFull {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        needed: u64,
    },
    /// The system refused to read or write state or layer inputs.
    #[error("{path}, bytes {offset} to {end}: {whose} cannot be {what}: {source}", path = path.display(), end = offset + *bytes as u64)]
    StateFile {
        /// Whose state or input it is.
        whose: String,
        /// `read` or `written`.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// First byte.
        offset: u64,
        /// Bytes.
        bytes: usize,
        /// The system's error.
        source: std::io::Error,
    },
    /// A state file ended early.
    #[error("{path}, byte {offset}: {whose} has {expected} bytes here, and the file gave {got}; it was shortened", path = path.display())]
    StateFileShort {
        /// Whose state or input it is.
        whose: String,
        /// The file.
        path: PathBuf,
        /// First byte.
        offset: u64,
        /// Bytes asked for.
        expected: usize,
        /// Bytes that there are.
        got: usize,
    },
    /// State, or a layer's input, that was read is not what was written.
    #[error("{path}, bytes {offset} to {end}: {whose} was damaged on disk: its checksum is {got:08x}, and {expected:08x} was written", path = path.display(), end = offset + *bytes as u64)]
    StateDamaged {
        /// Whose state or input it is, and of state which planes of which tensors.
        whose: String,
        /// The file.
        path: PathBuf,
        /// First byte.
        offset: u64,
        /// Bytes.
        bytes: usize,
        /// CRC32 of what was written.
        expected: u32,
        /// CRC32 of what was read.
        got: u32,
    },

    // ---- Requests, options and plans ----
    /// A JSON document cannot be read or written.
    #[error("{what}: {source}")]
    Json {
        /// Which document.
        what: &'static str,
        /// What is wrong and where.
        source: serde_json::Error,
    },
    /// An integer setting is out of its range.
    #[error("{setting} must be {}, not {value}", range(*least, *most, why))]
    OutOfRange {
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: u64,
        /// The least that it may be.
        least: u64,
        /// The most, if there is a limit.
        most: Option<u64>,
        /// Why; empty where that is plain.
        why: &'static str,
    },
    /// A real number is out of its range.
    #[error("{what} is {value}; it must be {allowed}")]
    WrongNumber {
        /// The setting.
        what: String,
        /// Its value.
        value: f64,
        /// What it may be.
        allowed: &'static str,
    },
    /// The large group has fewer micro-batches than the others, or more than a step.
    #[error("plan.large_group must be between plan.group = {least} and micro_batches = {micro_batches}, not {value}")]
    LargeGroupOutOfRange {
        /// The micro-batches of the large group.
        value: u32,
        /// Those of the others.
        least: u32,
        /// Those of a step.
        micro_batches: u32,
    },
    /// A group has no micro-batches, or more than a step.
    #[error("plan.group must be between 1 and micro_batches = {micro_batches}, not {value}")]
    GroupOutOfRange {
        /// The micro-batches of a group.
        value: u32,
        /// Those of a step.
        micro_batches: u32,
    },
    /// A setting counts more than the model has.
    #[error("{setting} = {value} exceeds the {count} {of} of the model")]
    ExceedsModel {
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: u32,
        /// How many there are.
        count: usize,
        /// What is counted.
        of: &'static str,
    },
    /// The state, or the weights, of more units was asked for on disk than there is.
    #[error(
        "{setting} = {asked}, but only {most} units have state that may go to disk: it goes there for units that \
         train and whose state is not on the device"
    )]
    TooFewUnitsForDisk {
        /// The setting.
        setting: &'static str,
        /// How many were asked for.
        asked: u32,
        /// How many there are at most.
        most: usize,
    },
    /// The inputs of more layers were asked for on disk than wait anywhere.
    #[error("plan.inputs_on_disk = {asked}, but the plan keeps the activations of all but {left} units of layers")]
    TooFewInputsForDisk {
        /// How many were asked for.
        asked: u32,
        /// How many are not kept, at most.
        left: usize,
    },
    /// All inputs were asked for in a place that takes a count.
    #[error(
        "plan.inputs is disk; write device or host, and how many units' inputs wait on disk as plan.inputs_on_disk"
    )]
    InputsPlace,
    /// Two settings contradict each other.
    #[error("{setting} = {value} contradicts {other}")]
    Contradiction {
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: u32,
        /// What it contradicts.
        other: &'static str,
    },
    /// Shared slabs were asked for where every gradient has its own.
    #[error(
        "plan.slabs = {slabs} needs train.update: immediate; just in time each gradient waits in a slab of its own"
    )]
    SlabsJustInTime {
        /// How many.
        slabs: u32,
    },
    /// bf16 gradients were asked for with fp32 weights.
    #[error("precision fp32 sends fp32 gradients; grad_precision bf16 needs precision bf16")]
    GradPrecision,
    /// A master of 24 bits was asked for with fp32 weights.
    #[error("a 24-bit master is bf16 weights and 8 bits beside them, and precision fp32 keeps whole fp32 weights")]
    MasterPrecision,
    /// Passes were to be accumulated under immediate updates.
    #[error(
        "immediate updates apply each gradient at once: several passes cannot be accumulated; use train.update: just_in_time"
    )]
    ImmediateAccumulation,
    /// A model has too few units.
    #[error("a model has embed, at least one layer and head; {given} units were given")]
    TooFewUnits {
        /// How many there are.
        given: usize,
    },
    /// A unit is at a place where its role does not belong.
    #[error("unit {index} ({unit}) must have the role {expected}, not {got}")]
    WrongRole {
        /// Its index.
        index: usize,
        /// Its name.
        unit: String,
        /// The role of that place.
        expected: &'static str,
        /// Its own.
        got: &'static str,
    },
    /// A unit is to be computed with weights that it cannot have.
    #[error(
        "unit {unit} is to be computed with the weights of unit {holder}; only a layer without tensors can be, and only with \
         those of an earlier layer that has some"
    )]
    WeightsOf {
        /// The unit.
        unit: String,
        /// The one whose weights it asks for.
        holder: u32,
    },
    /// Experts that cannot be sent in part.
    #[error(
        "unit {unit} is to be sent in part, as unit {by} routes tokens to its {experts} experts; only a layer after that unit can \
         be, all of whose tensors have as many rows, and none that routes is itself sent so"
    )]
    Routed {
        /// The unit.
        unit: String,
        /// The one that routes.
        by: u32,
        /// The experts that it is said to have.
        experts: u32,
    },
    /// Two units share a name.
    #[error("two units are called {unit}; every unit needs a name of its own")]
    DuplicateUnit {
        /// The name.
        unit: String,
    },
    /// Two tensors of a unit share a name.
    #[error("unit {unit} declares the tensor {tensor} twice")]
    DuplicateTensor {
        /// The unit.
        unit: String,
        /// The name.
        tensor: String,
    },
    /// Every tensor is frozen.
    #[error("no tensor is trainable: there is nothing to train")]
    NothingToTrain,
    /// A unit has more elements than can be laid out.
    #[error("tensor {tensor} of shape {shape:?} makes unit {unit} larger than 2^{log2} elements")]
    UnitTooLarge {
        /// The unit.
        unit: String,
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
        /// The limit's exponent.
        log2: u32,
    },
    /// There are more of something than can be counted or addressed.
    #[error("{count} {what} are more than the {most} that are supported")]
    TooMany {
        /// What.
        what: &'static str,
        /// How many.
        count: u64,
        /// How many there may be.
        most: u64,
    },
    /// A size is beyond what any machine has; sums of such sizes would not be sums any more.
    #[error("{what} takes {bytes} bytes, more than the 2^{log2} that are counted with")]
    TooLarge {
        /// A line of the sum.
        what: String,
        /// Its bytes, as far as they can be counted.
        bytes: u64,
        /// The limit's exponent.
        log2: u32,
    },
    /// A model and a batch make up more operations than a schedule may have.
    #[error(
        "micro_batches = {micro_batches} of {units} units make up more than the {most} computations that a step may have; use fewer and larger micro-batches"
    )]
    TooManyOperations {
        /// The micro-batches.
        micro_batches: u32,
        /// The units.
        units: usize,
        /// The limit.
        most: u64,
    },
    /// A plan and a request do not belong together.
    #[error("the plan was made for another request: {what} is {plan} in it, {request} here; plan again")]
    PlanMismatch {
        /// The first difference.
        what: &'static str,
        /// Its value in the plan.
        plan: String,
        /// Its value in the request.
        request: String,
    },
    /// A plan's staging buffers are too few or too small.
    #[error(
        "{buffers} staging buffers of {bytes} bytes cannot hold the {needed} bytes of a unit's activations; at least 2 that can are needed"
    )]
    StagingTooSmall {
        /// How many.
        buffers: u32,
        /// Bytes of each.
        bytes: u64,
        /// Bytes of the largest unit's.
        needed: u64,
    },
    /// A plan updates a unit on the device in a way that it has no buffers for.
    #[error(
        "unit {unit} is updated on the device with its state on the host: that needs buffers (the plan has {buffers}), a decoder layer, and gradients that are not accumulated over passes"
    )]
    DeviceUpdate {
        /// The unit.
        unit: String,
        /// How many buffers there are.
        buffers: u32,
    },

    // ---- Units, tensors and their planes ----
    /// There is no such unit.
    #[error("there is no unit {index}: the model has {units}, counted from 0")]
    UnknownUnit {
        /// The index asked for.
        index: usize,
        /// How many units there are.
        units: usize,
    },
    /// There is no such tensor.
    #[error("unit {unit} has no tensor {index}: it has {tensors}, counted from 0")]
    UnknownTensor {
        /// The unit.
        unit: String,
        /// The index asked for.
        index: usize,
        /// How many tensors it has.
        tensors: usize,
    },
    /// There is no such plane.
    #[error("there is no plane {name:?}, only master, weights, residual, exp_avg and exp_avg_sq")]
    UnknownPlane {
        /// The name asked for.
        name: String,
    },
    /// A frozen tensor has no such plane.
    #[error("{tensor} is frozen and has no {what}: its values are the plane weights, as {dtype}")]
    Frozen {
        /// The tensor.
        tensor: String,
        /// The plane, or `gradient`.
        what: &'static str,
        /// In which dtype it is stored.
        dtype: &'static str,
    },
    /// Weights that are stored in fp32 have no residual.
    #[error("{tensor} has no residual: its weights are stored in fp32")]
    NoResidual {
        /// The tensor.
        tensor: String,
    },
    /// A plan has weights on disk without the state that they are part of.
    #[error("the plan has the weights of unit {unit} on disk, and its state elsewhere; plan again")]
    WeightsWithoutState {
        /// The unit's name.
        unit: String,
    },
    /// A unit's residual and moments are on disk, not in the store.
    #[error("the state of unit {unit} is on disk; read and write it through the engine")]
    StateOnDisk {
        /// The unit's name.
        unit: String,
    },
    /// A unit's weights are on disk, not in the store.
    #[error("the weights of unit {unit} are on disk; read and write them through the engine")]
    WeightsOnDisk {
        /// The unit's name.
        unit: String,
    },
    /// The planes of a unit are on the device, not in the store.
    #[error("the state of unit {unit} is on the device; read and write it through the engine")]
    StateOnDevice {
        /// The unit.
        unit: String,
    },
    /// Values have another dtype than is taken.
    #[error("{what} takes {expected}, not {got}")]
    WrongDtype {
        /// What takes them.
        what: String,
        /// What it takes.
        expected: &'static str,
        /// What was given.
        got: &'static str,
    },
    /// Two lengths that must agree do not.
    #[error("{what} needs {expected} bytes of {of}, not {got}")]
    WrongLength {
        /// What was to be done.
        what: String,
        /// With which bytes.
        of: &'static str,
        /// Bytes needed.
        expected: u64,
        /// Bytes given.
        got: u64,
    },
    /// Bytes are not a whole number of elements.
    #[error("{tensor}: {bytes} bytes are not a whole number of {dtype} elements")]
    PartialElement {
        /// The tensor.
        tensor: String,
        /// How many bytes.
        bytes: usize,
        /// Of which dtype.
        dtype: &'static str,
    },
    /// A range goes beyond a tensor's end.
    #[error("{tensor}: elements {start}..{start}+{len} leave a tensor of {numel} elements")]
    OutOfBounds {
        /// The tensor.
        tensor: String,
        /// First element.
        start: u64,
        /// How many.
        len: u64,
        /// Elements of the tensor.
        numel: u64,
    },
    /// A value cannot be stored.
    #[error("{tensor}: element {index} of {plane} is {value} in fp32; values must be finite")]
    NotFinite {
        /// The tensor.
        tensor: String,
        /// The plane.
        plane: &'static str,
        /// The first such element.
        index: u64,
        /// Its value.
        value: f32,
    },
    /// An arena has too little memory left.
    #[error("an arena of {bytes} bytes has {left} left, not {asked}")]
    ArenaFull {
        /// Bytes of the arena.
        bytes: u64,
        /// Bytes left.
        left: u64,
        /// Bytes asked for.
        asked: u64,
    },
    /// More bytes than the address space has.
    #[error("{bytes} bytes exceed the address space")]
    AddressSpace {
        /// How many.
        bytes: u64,
    },

    // ---- The optimizer and devices ----
    /// There are no such kernels.
    #[error("{asked_by}: {name:?} is not one of auto, scalar, avx2, avx512")]
    UnknownIsa {
        /// The option or variable that asked.
        asked_by: &'static str,
        /// What it asked for.
        name: String,
    },
    /// The processor cannot run these kernels.
    #[error("{asked_by}: this processor lacks {name}; the best it has is {best}")]
    MissingIsa {
        /// The option or variable that asked.
        asked_by: &'static str,
        /// What it asked for.
        name: &'static str,
        /// What the processor has.
        best: &'static str,
    },
    /// Threads were to be bound to no cores.
    #[error("the list of cores for the optimizer's threads is empty; name at least one, or leave them free")]
    NoCores,
    /// A device's memory does not have the size or alignment that a call needs.
    #[error("{what}: {numel} aligned elements of {size} bytes are needed, {bytes} bytes at {address:#x} were given")]
    WrongMemory {
        /// What it is.
        what: &'static str,
        /// Elements needed.
        numel: u64,
        /// Bytes of each.
        size: u64,
        /// Bytes given.
        bytes: u64,
        /// Where.
        address: u64,
    },
    /// An event was recorded by another device.
    #[error("the event belongs to another kind of device")]
    ForeignEvent,
    /// A device breaks a rule of the conformance suite.
    #[error("the device breaks the rule \"{rule}\": {detail}")]
    DeviceRule {
        /// The rule.
        rule: &'static str,
        /// How.
        detail: String,
    },

    // ---- Schedules ----
    /// A pass has no micro-batches, or more than the plan.
    #[error("a pass of {asked} micro-batches was asked for; the plan has room for 1 to {most}")]
    PassSize {
        /// The micro-batches asked for.
        asked: u32,
        /// The plan's.
        most: u32,
    },
    /// An operation of a schedule breaks a rule.
    #[error("schedule: operation {op} ({kind} of unit {unit}, micro-batch {micro_batch}) breaks a rule: {rule}")]
    OpRule {
        /// Its position.
        op: u32,
        /// What it does.
        kind: String,
        /// To which unit.
        unit: u32,
        /// For which micro-batch.
        micro_batch: u32,
        /// The rule.
        rule: String,
    },
    /// A schedule has an operation too few or too many.
    #[error("schedule: {what} occurs {found} times, not {expected}")]
    OpCount {
        /// The operation.
        what: String,
        /// How often it occurs.
        found: u64,
        /// How often it should.
        expected: u64,
    },
    /// A schedule takes weights to be on the device that are not.
    #[error("schedule: unit {unit} is not on the device when the pass begins")]
    NotResident {
        /// The unit.
        unit: u32,
    },

    // ---- The state of the engine ----
    /// The engine has been closed.
    #[error("the engine is closed")]
    Closed,
    /// A call cannot be made while a pass is computed.
    #[error("a pass is under way: {remedy}")]
    PassUnderWay {
        /// What to do.
        remedy: &'static str,
    },
    /// A plan that takes over an engine's state would have to move it.
    #[error("{what} differs between the plans, so that the state of the closed engine would have to move")]
    OtherState {
        /// The first difference.
        what: &'static str,
    },
    /// State of a closed engine that another one has taken over already.
    #[error("another engine has taken this state over; close that one first")]
    StateInUse,
    /// A call needs a pass.
    #[error("no pass has begun")]
    NoPass,
    /// Experts were named at another time than while the unit that routes computes forward, or not as many as there are.
    #[error(
        "{given} experts of unit {unit} were named; its {experts} are named while the forward of the unit that routes to them is computed"
    )]
    NotRouting {
        /// The unit.
        unit: usize,
        /// Those that were named.
        given: usize,
        /// Its experts; 0 where it is not sent in part.
        experts: usize,
    },
    /// A unit is to be sent in part, and nobody said which.
    #[error("nobody has named the experts of unit {unit} that tokens are routed to")]
    NotRouted {
        /// The unit.
        unit: String,
    },
    /// Another operation was asked for before the last one had been finished.
    #[error("operation {id} was handed out and has not been finished")]
    NotFinished {
        /// The operation.
        id: u64,
    },
    /// An operation was finished that is not being computed.
    #[error("operation {id} was not handed out, or has been finished already")]
    NotHandedOut {
        /// The operation.
        id: u64,
    },
    /// Gradients wait for a decision.
    #[error("gradients of the last pass were neither applied nor abandoned; apply them, or accumulate")]
    GradientsWait,
    /// There are no gradients to apply.
    #[error("no gradients wait: no training pass has begun since the last one was applied or abandoned")]
    NothingToApply,
    /// There are no gradients to add to.
    #[error("there are no gradients to accumulate to: the last pass was applied or abandoned")]
    NothingToAccumulate,
    /// The plan cannot accumulate gradients over passes.
    #[error("the plan has no store for gradients of several passes; plan with requests.accumulate")]
    NoGradientStore,
    /// Hyper-parameters were not given when they are needed, or given when they are not.
    #[error("{when} updates take the hyper-parameters of every group {given}")]
    GroupsAtWrongTime {
        /// Which updates.
        when: &'static str,
        /// When they are given.
        given: &'static str,
    },
    /// A tensor's parameter group is missing.
    #[error("{tensor} belongs to parameter group {group}; {given} groups were given")]
    MissingGroup {
        /// The tensor.
        tensor: String,
        /// Its group.
        group: u32,
        /// How many were given.
        given: usize,
    },
    /// Immediate updates cannot be clipped.
    #[error("max_grad_norm = {max_norm}: immediate updates cannot be clipped by the norm of all gradients")]
    ImmediateClipping {
        /// The norm asked for.
        max_norm: f64,
    },
    /// A gradient is not finite and some updates have been made.
    #[error("the gradient of unit {unit} is not finite; with immediate updates the step cannot be taken back")]
    GradientNotFinite {
        /// The unit.
        unit: String,
    },
    /// An update has no decision about its gradients.
    #[error("an update without a decision; please report this")]
    Undecided,
    /// Gradients cannot be written.
    #[error("a gradient is computed, not written")]
    GradientReadOnly,
    /// There is no gradient to read yet.
    #[error("{tensor} has no gradient: no training pass has been computed")]
    NoGradientYet {
        /// The tensor.
        tensor: String,
    },
    /// A gradient has been overwritten.
    #[error("the gradient of {tensor} is gone: with immediate updates layers share their slabs")]
    GradientGone {
        /// The tensor.
        tensor: String,
    },
    /// Looked-up rows were given for a tensor that is not an embedding table.
    #[error("tensor {tensor} of unit {unit} is not a trainable embedding table")]
    NotATable {
        /// Index of the tensor.
        tensor: usize,
        /// The unit.
        unit: String,
    },
    /// Looked-up rows are not in order.
    #[error("rows of {table} must be distinct and ascending; {second} follows {first}")]
    RowOrder {
        /// The table.
        table: String,
        /// A row.
        first: u64,
        /// The one after it.
        second: u64,
    },
    /// Ranges of an update are not in order.
    #[error("ranges of an update must ascend; one from element {second} of tensor {tensor} follows one from {first}")]
    RangeOrder {
        /// The tensor: its place among the updates.
        tensor: usize,
        /// Where the range before it starts.
        first: u64,
        /// Where it starts.
        second: u64,
    },
    /// A row was looked up that the table does not have.
    #[error("row {row} was looked up in {table}, which has {rows} rows")]
    UnknownRow {
        /// The table.
        table: String,
        /// The row.
        row: u64,
        /// How many there are.
        rows: u64,
    },
    /// No save was begun.
    #[error("no save has begun")]
    NoSave,
    /// A save is under way already.
    #[error("a save is under way: finish it, or cancel it, before another")]
    SaveUnderWay,
    /// The save was cancelled, or has failed.
    #[error("the save was cancelled")]
    SaveCancelled,
    /// The engine was closed while it saved.
    #[error("the engine was closed before everything had been saved")]
    ClosedWhileSaving,
    /// A file of a checkpoint cannot be written as described.
    #[error("{path}: {rule}", path = path.display())]
    SaveFile {
        /// The file.
        path: PathBuf,
        /// What files must be like.
        rule: &'static str,
    },
    /// A layer's input could not be written to disk or read again. The pass can be abandoned; the state is as it was before.
    #[error("{op} of unit {unit} failed, so that this pass cannot be finished: {cause}")]
    PassFailed {
        /// The unit's name.
        unit: String,
        /// The operation.
        op: String,
        /// What happened.
        cause: String,
    },
    /// An operation of a step failed; the engine refuses everything from then on.
    #[error("the engine is broken since {op} of unit {unit}: {cause}")]
    Broken {
        /// The unit's name.
        unit: String,
        /// The operation.
        op: String,
        /// What happened.
        cause: String,
    },
}

/// The core's result.
pub type Result<T> = std::result::Result<T, Error>;
