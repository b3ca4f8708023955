//! The process that runs reward functions and environments: Python, next to the run, one line of JSON for each request and answer. A call
//! that takes too long ends it. Knows neither models nor advantages.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use options::OptionValue;
use serde_json::{Value, json};

use crate::config::RewardFunction;
use crate::error::{Result, TrainError};

/// The Python module that answers.
const MODULE: &str = "surogate.rewards.worker";

/// Rewards of answers: of each answer one for each function; none where the function does not judge it.
pub(super) type Scores = Vec<Vec<Option<f64>>>;

/// A process with loaded reward functions.
pub(super) struct Judge {
    child: Child,
    requests: ChildStdin,
    answers: Receiver<std::io::Result<String>>,
    timeout: Duration,
    /// Names of the functions and their weights.
    pub functions: Vec<(String, f64)>,
}

impl Judge {
    /// Starts the process and loads the functions. Errors: Python cannot be started, or a function cannot be loaded.
    pub fn start(
        python: Option<&Path>,
        functions: &[RewardFunction],
        environment: Option<&str>,
        timeout: f64,
    ) -> Result<Judge> {
        let missing = "reward functions run in Python, and the path of its interpreter is not known";
        let python = python.ok_or_else(|| TrainError::Usage(missing.to_owned()))?;
        let started = Command::new(python)
            // Nothing of the working directory is imported but what `rewards` names.
            .args(["-P", "-m", MODULE])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn();
        let mut child = started.map_err(|e| {
            TrainError::Failed(format!("{}: reward functions cannot be started: {e}", python.display()))
        })?;
        let requests = child.stdin.take().expect("it is piped");
        let lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        let (sender, answers) = channel();
        thread::Builder::new()
            .name("rewards".into())
            .spawn(move || lines.into_iter().try_for_each(|line| sender.send(line).map_err(drop)))
            .map_err(|e| TrainError::Failed(format!("reward functions cannot be read: {e}")))?;
        let names = names(functions);
        let functions_by_name = names.iter().cloned().zip(functions.iter().map(|of| of.weight)).collect();
        let timeout = Duration::from_secs_f64(timeout);
        let mut judge = Judge { child, requests, answers, timeout, functions: functions_by_name };
        let loaded: Vec<Value> = functions.iter().map(OptionValue::write).collect();
        // Imports of large libraries take a while.
        let answer = judge.ask(
            &json!({"load": loaded, "environment": environment}),
            judge.timeout.max(Duration::from_secs(120)),
            "loading",
        )?;
        refused(&answer).map_or(Ok(judge), |text| Err(TrainError::Usage(text)))
    }

    /// Returns the rewards of answers. `columns`: of the rows of the data, by name, a value for each answer.
    pub fn scores(&mut self, prompts: &[Value], completions: &[Value], columns: &Value) -> Result<Scores> {
        let mut scores: Scores = vec![Vec::new(); completions.len()];
        for index in 0..self.functions.len() {
            let name = self.functions[index].0.clone();
            let request =
                json!({"function": index, "prompts": prompts, "completions": completions, "columns": columns});
            let answer = self.ask(&request, self.timeout, &name)?;
            if let Some(text) = refused(&answer) {
                return Err(TrainError::Failed(text));
            }
            let rewards = answer["rewards"].as_array().filter(|of| of.len() == completions.len());
            let rewards = rewards.ok_or_else(|| TrainError::Failed(format!("reward `{name}` answered {answer}")))?;
            scores.iter_mut().zip(rewards).for_each(|(of, reward)| of.push(reward.as_f64()));
        }
        Ok(scores)
    }

    /// Makes an environment for each answer. Returns the messages or the text that it puts after the prompt, null where it puts
    /// none.
    pub fn reset(&mut self, prompts: &[Value], columns: &Value) -> Result<Vec<Value>> {
        self.replies(&json!({"reset": {"prompts": prompts, "columns": columns}}), prompts.len())
    }

    /// Gives environments the texts of turns. Returns the messages or the text that follow each, null at its end.
    pub fn step(&mut self, turns: &[(usize, &str)]) -> Result<Vec<Value>> {
        self.replies(&json!({"step": turns}), turns.len())
    }

    fn replies(&mut self, request: &Value, count: usize) -> Result<Vec<Value>> {
        let answer = self.ask(request, self.timeout, "environment")?;
        if let Some(text) = refused(&answer) {
            return Err(TrainError::Failed(text));
        }
        let replies = answer["replies"].as_array().filter(|of| of.len() == count).cloned();
        replies.ok_or_else(|| TrainError::Failed(format!("the environment answered {answer}")))
    }

    fn ask(&mut self, request: &Value, timeout: Duration, name: &str) -> Result<Value> {
        let ended = |what: String| TrainError::Failed(format!("the process of reward functions ended: {what}"));
        writeln!(self.requests, "{request}").and_then(|()| self.requests.flush()).map_err(|e| ended(e.to_string()))?;
        match self.answers.recv_timeout(timeout) {
            Ok(Ok(line)) => serde_json::from_str(&line).map_err(|e| ended(format!("{e} in {line:?}"))),
            Ok(Err(error)) => Err(ended(error.to_string())),
            Err(RecvTimeoutError::Disconnected) => {
                let status = self.child.wait().map(|status| status.to_string());
                Err(ended(status.unwrap_or_else(|error| error.to_string())))
            }
            Err(RecvTimeoutError::Timeout) => {
                let _ = self.child.kill();
                Err(TrainError::Failed(format!(
                    "reward `{name}` gave no answer within {} s (`reward_timeout`)",
                    timeout.as_secs_f64()
                )))
            }
        }
    }
}

impl Drop for Judge {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The fault of an answer, if it is one.
fn refused(answer: &Value) -> Option<String> {
    answer["error"].as_str().map(str::to_owned)
}

/// Names for metrics: of `module:name` the latter; equal ones are numbered.
fn names(functions: &[RewardFunction]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for of in functions {
        let name = of.function.rsplit_once(':').map_or(of.function.as_str(), |(_, name)| name);
        let same = names.iter().filter(|known| *known == name || known.starts_with(&format!("{name}_"))).count();
        names.push(if same == 0 { name.to_owned() } else { format!("{name}_{}", same + 1) });
    }
    names
}
