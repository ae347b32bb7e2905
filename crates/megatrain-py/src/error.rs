//! The exception tree, and the only mapping from the core's errors and from panics to it.
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::Duration;

use megatrain_core::{Error, Item, Result, Tier};
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

create_exception!(megatrain._core, MegatrainError, PyException, "Base of every error of ours.");
create_exception!(
    megatrain._core,
    DoesNotFit,
    MegatrainError,
    "A plan needs more than a tier offers. `items` holds the sum, line by line."
);
create_exception!(megatrain._core, DeviceError, MegatrainError, "A device is missing, or a call on it failed.");
create_exception!(megatrain._core, StorageError, MegatrainError, "A file operation failed.");
create_exception!(
    megatrain._core,
    EngineBroken,
    MegatrainError,
    "An operation of a step failed; the engine refuses everything from then on."
);

/// Adds the exceptions to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let does_not_fit = py.get_type::<DoesNotFit>();
    // So that the attribute exists on every instance, also on one that Python code raises.
    does_not_fit.setattr("items", PyList::empty(py))?;
    module.add("MegatrainError", py.get_type::<MegatrainError>())?;
    module.add("DoesNotFit", does_not_fit)?;
    module.add("DeviceError", py.get_type::<DeviceError>())?;
    module.add("StorageError", py.get_type::<StorageError>())?;
    module.add("EngineBroken", py.get_type::<EngineBroken>())
}

/// The exception for an error of the core.
pub(crate) fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::DoesNotFit { items, .. } | Error::SharedMemory { items, .. } => does_not_fit(py, message, items),
        Error::HostMemory { call, bytes, .. } => {
            let item = Item { what: (*call).to_owned(), tier: Tier::Host, bytes: *bytes as u64, pinned: false };
            does_not_fit(py, message, &[item])
        }
        Error::Device { .. } | Error::NoDevice { .. } => DeviceError::new_err(message),
        Error::Storage { .. }
        | Error::StateFolder { .. }
        | Error::StateFilesFull { .. }
        | Error::StateFile { .. }
        | Error::StateFileShort { .. }
        | Error::StateDamaged { .. }
        | Error::PassFailed { .. } => StorageError::new_err(message),
        Error::Worker(_) | Error::Broken { .. } => EngineBroken::new_err(message),
        // All others name a request that cannot be honoured as written.
        _ => PyValueError::new_err(message),
    }
}

fn does_not_fit(py: Python<'_>, message: String, items: &[Item]) -> PyErr {
    let error = DoesNotFit::new_err(message);
    let rows = items
        .iter()
        .map(|item| {
            let row = PyDict::new(py);
            row.set_item("what", &item.what)?;
            row.set_item("tier", item.tier.name())?;
            row.set_item("bytes", item.bytes)?;
            row.set_item("pinned", item.pinned)?;
            Ok(row)
        })
        .collect::<PyResult<Vec<_>>>()
        .and_then(|rows| error.value(py).setattr("items", rows));
    match rows {
        Ok(()) => error,
        Err(failure) => failure,
    }
}

/// Runs `work` with the interpreter released, so that other threads of Python go on.
pub(crate) fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    let outcome = py.detach(|| caught(work));
    settle(py, outcome)
}

/// Runs long `work` on a thread of its own and looks after signals meanwhile. Once one raises, the exception is passed
/// on at once; the work ends by itself and what it made is dropped there.
pub(crate) fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    name: &str,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> PyResult<T> {
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        // Nobody listens any more after an interrupt.
        let _ = sender.send(caught(work));
    });
    thread.map_err(|e| EngineBroken::new_err(format!("the thread {name} could not be started: {e}")))?;
    let receiver = Mutex::new(receiver);
    loop {
        let answer = py.detach(|| receiver.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(SLICE));
        match answer {
            Ok(outcome) => return settle(py, outcome),
            Err(mpsc::RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(EngineBroken::new_err(format!("the thread {name} ended without an answer")));
            }
        }
    }
}

/// How long a wait lasts before signals are looked after.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

/// Outcome of a call: its result, or the message of a panic.
type Outcome<T> = std::result::Result<Result<T>, String>;

fn caught<T>(work: impl FnOnce() -> Result<T>) -> Outcome<T> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let words = panic.downcast_ref::<&str>().copied();
        let words = words.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        words.unwrap_or("a panic without a message").to_owned()
    })
}

/// A panic is a bug of ours and becomes an ordinary exception that says so: PyO3's own for it would pass every
/// `except Exception`.
fn settle<T>(py: Python<'_>, outcome: Outcome<T>) -> PyResult<T> {
    match outcome {
        Ok(result) => result.map_err(|error| to_python(py, &error)),
        Err(words) => Err(EngineBroken::new_err(format!("a bug in the native core: {words}; please report it"))),
    }
}
