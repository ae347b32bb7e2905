//! What ran when: spans of every lane, written as a Chrome trace that Perfetto reads.
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::device::{Device, Event, Stream};
use crate::error::Result;
use crate::schedule::{Lane, Op};

struct Span {
    lane: Lane,
    name: String,
    micro_batch: u32,
    start_us: f64,
    length_us: f64,
}

/// Collects spans while it is on.
pub(crate) struct Trace {
    origin: Instant,
    /// The same moment on the device's clock.
    device_origin: Option<Event>,
    spans: Mutex<Vec<Span>>,
}

impl Trace {
    pub(crate) fn new(device: &dyn Device, on: bool) -> Result<Self> {
        // Statistics are kept of every run, so that events keep their times whether or not spans are recorded.
        device.keep_times(true);
        let mut origin = Instant::now();
        let mut device_origin = None;
        if on {
            let event = device.record(Stream::Upload)?;
            device.synchronize(&event)?;
            origin = Instant::now();
            device_origin = Some(event);
        }
        Ok(Self { origin, device_origin, spans: Mutex::new(Vec::new()) })
    }

    /// An operation that the host ran.
    pub(crate) fn host(&self, op: &Op, unit: &str, start: Instant, end: Instant) {
        if self.device_origin.is_some() {
            let us = |at: Instant| at.saturating_duration_since(self.origin).as_secs_f64() * 1e6;
            self.push(op, unit, us(start), us(end) - us(start));
        }
    }

    /// An operation between two events of the device.
    pub(crate) fn device(&self, device: &dyn Device, op: &Op, unit: &str, start: &Event, end: &Event) -> Result<()> {
        let Some(origin) = &self.device_origin else { return Ok(()) };
        if let (Some(start), Some(length)) = (device.elapsed_ms(origin, start)?, device.elapsed_ms(start, end)?) {
            self.push(op, unit, start * 1e3, length * 1e3);
        }
        Ok(())
    }

    fn push(&self, op: &Op, unit: &str, start_us: f64, length_us: f64) {
        let name = format!("{} {unit}", format!("{:?}", op.kind).to_lowercase());
        let span = Span { lane: op.lane, name, micro_batch: op.micro_batch, start_us, length_us };
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).push(span);
    }

    /// The trace as JSON.
    pub(crate) fn to_json(&self) -> String {
        let spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        let mut events: Vec<String> = Lane::ALL
            .iter()
            .filter(|lane| spans.iter().any(|s| s.lane == **lane))
            .map(|lane| {
                let (tid, name) = (*lane as u8, lane.name());
                format!(r#"{{"ph":"M","pid":1,"tid":{tid},"name":"thread_name","args":{{"name":"{name}"}}}}"#)
            })
            .collect();
        for span in spans.iter() {
            // Names of units may hold anything; serde escapes them.
            let name = serde_json::to_string(&span.name).unwrap_or_default();
            let mut event = String::new();
            let _ = write!(
                event,
                r#"{{"ph":"X","pid":1,"tid":{},"name":{name},"ts":{:.3},"dur":{:.3},"args":{{"micro_batch":{}}}}}"#,
                span.lane as u8, span.start_us, span.length_us, span.micro_batch
            );
            events.push(event);
        }
        format!("{{\"traceEvents\":[{}]}}", events.join(",\n"))
    }
}
