//! What ran when: spans of every lane, written as a Chrome trace that Perfetto reads.
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

struct Span {
    row: u8,
    name: String,
    micro_batch: u32,
    start_us: f64,
    length_us: f64,
}

/// What a span is about.
pub(crate) struct SpanOf<'a> {
    /// Its row in the trace.
    pub(crate) row: u8,
    /// What was done.
    pub(crate) kind: &'a str,
    /// To which unit.
    pub(crate) unit: &'a str,
    /// For which micro-batch.
    pub(crate) micro_batch: u32,
}

/// Collects spans while it is on.
pub(crate) struct Trace {
    origin: Instant,
    on: bool,
    spans: Mutex<Vec<Span>>,
}

impl Trace {
    /// A trace that begins now.
    pub(crate) fn new(on: bool) -> Self {
        Self { origin: Instant::now(), on, spans: Mutex::new(Vec::new()) }
    }

    /// An operation that the host ran.
    pub(crate) fn host(&self, of: SpanOf<'_>, start: Instant, end: Instant) {
        if self.on {
            let us = |at: Instant| at.saturating_duration_since(self.origin).as_secs_f64() * 1e6;
            self.push(of, us(start), us(end) - us(start));
        }
    }

    /// An operation that the device ran, in milliseconds since the trace began.
    pub(crate) fn device(&self, of: SpanOf<'_>, start_ms: f64, length_ms: f64) {
        if self.on {
            self.push(of, start_ms * 1e3, length_ms * 1e3);
        }
    }

    fn push(&self, of: SpanOf<'_>, start_us: f64, length_us: f64) {
        let SpanOf { row, kind, unit, micro_batch } = of;
        let span = Span { row, name: format!("{kind} {unit}"), micro_batch, start_us, length_us };
        self.spans.lock().unwrap_or_else(PoisonError::into_inner).push(span);
    }

    /// The trace as JSON; `rows` are the names of the rows by number.
    pub(crate) fn to_json(&self, rows: &[&str]) -> String {
        let spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        let mut events: Vec<String> = rows
            .iter()
            .enumerate()
            .filter(|(row, _)| spans.iter().any(|s| usize::from(s.row) == *row))
            .map(|(row, name)| {
                format!(r#"{{"ph":"M","pid":1,"tid":{row},"name":"thread_name","args":{{"name":"{name}"}}}}"#)
            })
            .collect();
        for span in spans.iter() {
            // Names of units may hold anything; serde escapes them.
            let name = serde_json::to_string(&span.name).unwrap_or_default();
            let mut event = String::new();
            let _ = write!(
                event,
                r#"{{"ph":"X","pid":1,"tid":{},"name":{name},"ts":{:.3},"dur":{:.3},"args":{{"micro_batch":{}}}}}"#,
                span.row, span.start_us, span.length_us, span.micro_batch
            );
            events.push(event);
        }
        format!("{{\"traceEvents\":[{}]}}", events.join(",\n"))
    }
}
