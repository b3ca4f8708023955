//! Files of streamed sets that a process of their own fetches: Python, one line of JSON for each request and answer. It
//! removes what is read, and everything at its end, which comes with the end of this process at the latest.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use data::{DataError, ShardId, Shards, Stop, StreamFile};
use serde_json::{Value, json};

/// The Python module that fetches.
const MODULE: &str = "surogate.storage.shards";

/// Interval at which `stop` is called while an answer is waited for.
const LOOK: Duration = Duration::from_millis(50);

/// The files of a set.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Here(Vec<PathBuf>),
    Elsewhere(Vec<StreamFile>),
}

/// A process that fetches files.
pub(crate) struct RemoteShards {
    child: Child,
    /// Closed first, by which the process ends.
    requests: Option<ChildStdin>,
    answers: Receiver<std::io::Result<String>>,
    sources: Vec<Source>,
    /// Number of the last request.
    request: u64,
}

impl RemoteShards {
    /// Starts the process; `limit` are the bytes that its files may take. Errors: Python cannot be started.
    pub fn start(python: &Path, sources: Vec<Source>, limit: u64) -> Result<RemoteShards, DataError> {
        let failed = |e: std::io::Error| DataError::invalid(python.display(), format!("files cannot be fetched: {e}"));
        let mut child = Command::new(python)
            .args(["-P", "-m", MODULE])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .map_err(failed)?;
        let requests = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        let (sender, answers) = channel();
        thread::Builder::new()
            .name("shards".into())
            .spawn(move || lines.into_iter().try_for_each(|line| sender.send(line).map_err(drop)))
            .map_err(failed)?;
        let mut shards = RemoteShards { child, requests, answers, sources, request: 0 };
        let files: Vec<Value> = shards.sources.iter().map(listed).collect();
        shards.send(&json!({"limit": limit, "files": files}))?;
        Ok(shards)
    }

    fn send(&mut self, request: &Value) -> Result<(), DataError> {
        let requests = self.requests.as_mut().expect("it is open to the end");
        let sent = writeln!(requests, "{request}").and_then(|()| requests.flush());
        sent.map_err(|e| ended(&e.to_string()))
    }

    /// The answer to the last request.
    fn answer(&mut self, stop: Stop<'_>) -> Result<Value, DataError> {
        loop {
            match self.answers.recv_timeout(LOOK) {
                Ok(Ok(line)) => {
                    let answer: Value = serde_json::from_str(&line).map_err(|e| ended(&format!("{e} in {line:?}")))?;
                    // An earlier request may have been given up.
                    if answer["request"].as_u64() == Some(self.request) {
                        return Ok(answer);
                    }
                }
                Ok(Err(error)) => return Err(ended(&error.to_string())),
                Err(RecvTimeoutError::Timeout) if stop() => return Err(DataError::Stopped),
                Err(RecvTimeoutError::Timeout) => {}
                // A signal to all processes may reach that one first.
                Err(RecvTimeoutError::Disconnected) if stop() => return Err(DataError::Stopped),
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.child.wait().map(|status| status.to_string());
                    return Err(ended(&status.unwrap_or_else(|error| error.to_string())));
                }
            }
        }
    }
}

impl Shards for RemoteShards {
    fn get(&mut self, file: ShardId, next: &[ShardId], stop: Stop<'_>) -> Result<PathBuf, DataError> {
        let of = match &self.sources[file.set] {
            Source::Here(files) => return Ok(files[file.file].clone()),
            Source::Elsewhere(files) => files[file.file].name.clone(),
        };
        self.request += 1;
        let pair = |id: &ShardId| json!([id.set, id.file]);
        let next: Vec<Value> = next.iter().map(pair).collect();
        self.send(&json!({"request": self.request, "get": pair(&file), "next": next}))?;
        let answer = match self.answer(stop) {
            Ok(answer) => answer,
            Err(error) => {
                // A file that comes later would keep its room.
                self.release(file);
                return Err(error);
            }
        };
        match (answer["path"].as_str(), answer["error"].as_str()) {
            (Some(path), _) => Ok(PathBuf::from(path)),
            (None, Some(error)) => Err(DataError::invalid(of, error)),
            (None, None) => Err(ended(&format!("it answered {answer}"))),
        }
    }

    fn release(&mut self, file: ShardId) {
        if matches!(self.sources[file.set], Source::Elsewhere(_)) {
            // A process that has ended says so at the next request.
            let _ = self.send(&json!({"release": [file.set, file.file]}));
        }
    }
}

impl Drop for RemoteShards {
    fn drop(&mut self) {
        self.requests = None;
        let _ = self.child.wait();
    }
}

/// The files of a set as the process takes them: address, bytes, version; null where they are here.
fn listed(source: &Source) -> Value {
    match source {
        Source::Here(_) => Value::Null,
        Source::Elsewhere(files) => files.iter().map(|file| json!([file.name, file.bytes, file.version])).collect(),
    }
}

fn ended(what: &str) -> DataError {
    DataError::invalid("streaming", format!("the process that fetches files ended: {what}"))
}
