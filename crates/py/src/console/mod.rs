//! Console output of a run, and the signal that ends it, which Python passes on: one line per step and, on a terminal, a
//! panel below; or the events of the log; or nothing.
//!
//! Knows texts, events and signals, not what a step is. `panel.rs` formats the panel.

mod pace;
mod panel;

use std::fs::File;
use std::io::{BufReader, IsTerminal, Write, stdout};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use console::Term;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pace::Pace;
use panel::{Panel, shortened, wrapped};
use serde_json::{Value, json};
use train::Observer;

/// Draws of the panel in a second, at most.
const DRAWS: u8 = 10;

/// The kind of output that a run writes to standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Show {
    /// Lines for people; on a terminal a panel as well.
    Lines,
    /// The events of the log, one JSON object on a line.
    Events,
    Nothing,
}

/// Sentences of other threads, which wait for the next thing that a run shows.
static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// A sentence to be shown in between what a run shows by itself, without the passwords in it.
pub fn say(text: String) {
    let text = options::without_userinfo(&text).into_owned();
    SAID.lock().unwrap_or_else(PoisonError::into_inner).push(text);
}

/// Takes the messages that were reported but not shown.
pub fn unsaid() -> Vec<String> {
    std::mem::take(&mut SAID.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The number of the signal that ends the run; 0 for none.
static SIGNAL: AtomicU8 = AtomicU8::new(0);

/// True if the run ends at its next checkpoint.
static AT_CHECKPOINT: AtomicBool = AtomicBool::new(false);

/// The signal that ends a run at its next checkpoint.
const SIGUSR2: u8 = 12;

/// True if a run is about to write its first file, or has.
static BEGUN: AtomicBool = AtomicBool::new(false);

/// The way in which the other nodes of the run learn that it ends before its begin.
static LEAVE: Mutex<Option<Box<dyn Fn() + Send>>> = Mutex::new(None);

/// Sets what is called by [`leave`].
pub fn on_leave(call: impl Fn() + Send + 'static) {
    *LEAVE.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(call));
}

/// True if nothing of a run is written yet: its process may end. The other nodes learn of it.
pub fn leave() -> bool {
    if BEGUN.load(Ordering::SeqCst) {
        return false;
    }
    if let Some(call) = &*LEAVE.lock().unwrap_or_else(PoisonError::into_inner) {
        call();
    }
    true
}

/// SIGTERM, which stands for a signal that another node received.
const SIGTERM: u8 = 15;

/// Notes that a signal was received; 0 forgets those before.
pub fn signalled(number: u8) {
    match number {
        SIGUSR2 => AT_CHECKPOINT.store(true, Ordering::SeqCst),
        0 => {
            AT_CHECKPOINT.store(false, Ordering::SeqCst);
            BEGUN.store(false, Ordering::SeqCst);
            *LEAVE.lock().unwrap_or_else(PoisonError::into_inner) = None;
            SIGNAL.store(0, Ordering::SeqCst);
        }
        number => SIGNAL.store(number, Ordering::SeqCst),
    }
}

/// Writes the path of a run's log to files. Readers that have exited are ignored.
pub fn announce(files: &[PathBuf], log: &Value, output: &Value) {
    let reported = format!("{}\n", json!({"log": log, "output": output}));
    for path in files {
        let _ =
            std::fs::OpenOptions::new().write(true).open(path).and_then(|mut file| file.write_all(reported.as_bytes()));
    }
}

/// Lines go to standard output.
pub struct Console {
    show: Show,
    /// Files that receive the path of the log, as soon as there is one.
    announce: Vec<PathBuf>,
    /// On a terminal, from the first step on.
    bar: Option<ProgressBar>,
    /// Columns of the terminal when the bar was drawn last.
    columns: usize,
    panel: Panel,
    pace: Pace,
}

impl Console {
    pub fn new(show: Show, announce: Vec<PathBuf>) -> Console {
        let pace = Pace::begin(Instant::now());
        Console { show, announce, bar: None, columns: width(), panel: Panel::default(), pace }
    }

    /// 128 and the signal that was received here; else it was received by another node, and this one is ended.
    pub fn exit_code(&self) -> u8 {
        match SIGNAL.load(Ordering::SeqCst) {
            0 if AT_CHECKPOINT.load(Ordering::SeqCst) => 128 + SIGUSR2,
            0 => 128 + SIGTERM,
            signal => 128 + signal,
        }
    }

    /// A terminal that became narrower has wrapped the lines of the bar: the rows that this made are cleared, too, before
    /// anything is drawn over what the bar takes for its own.
    fn fit_bar(&mut self) {
        let (before, now) = (std::mem::replace(&mut self.columns, width()), width());
        let Some(bar) = self.bar.as_ref().filter(|_| now > 0 && now < before) else { return };
        let rows = |length: usize| length.div_ceil(now).max(1);
        let more = rows(before) + rows(self.panel.line(before).chars().count()) - 2;
        bar.suspend(|| {
            let _ = Term::stdout().clear_last_lines(more);
        });
    }

    fn print(&self, text: &str) {
        match &self.bar {
            Some(bar) => wrapped(shortened(text, width()), width()).iter().for_each(|line| bar.println(line)),
            // A reader that has gone away does not end a run.
            None => {
                let is_shown_to_people = self.show == Show::Lines && stdout().is_terminal();
                let text = match is_shown_to_people {
                    true => wrapped(shortened(text, width()), width()).join("\n"),
                    false => text.to_owned(),
                };
                let _ = writeln!(stdout(), "{text}").and_then(|()| stdout().flush());
            }
        }
    }

    /// Shows what others said: next to what a program reads, on standard error.
    fn pass_on(&self) {
        for text in unsaid() {
            match self.show {
                Show::Lines => self.print(&options::visible(&format!("Note: {text}"))),
                Show::Events | Show::Nothing => eprintln!("surogate: {}", options::visible(&text)),
            }
        }
    }
}

impl Observer for Console {
    fn line(&mut self, text: &str) {
        self.fit_bar();
        self.pass_on();
        if self.show == Show::Lines {
            self.print(&options::visible(&options::without_userinfo(text)));
        }
    }

    /// A file or a pipe gets prose as it is.
    fn prose(&mut self, text: &str) {
        self.fit_bar();
        self.pass_on();
        match self.show == Show::Lines && !stdout().is_terminal() {
            true => self.print(text),
            false if self.show == Show::Lines => self.print(&options::visible_text(text)),
            false => {}
        }
    }

    fn begun(&mut self) {
        BEGUN.store(true, Ordering::SeqCst);
    }

    fn event(&mut self, event: &Value) {
        if matches!(event["event"].as_str(), Some("start" | "resume")) {
            let (log, output) = (&event["manifest"]["log"], &event["manifest"]["output"]);
            announce(&std::mem::take(&mut self.announce), log, output);
        }
        if self.show == Show::Events {
            self.print(&options::visible(&event.to_string()));
        }
        self.fit_bar();
        if let ("resume", Some(log)) = (event["event"].as_str().unwrap_or_default(), event["manifest"]["log"].as_str())
            && let Ok(file) = File::open(log)
        {
            self.panel.recall(BufReader::new(file), event["step"].as_u64().unwrap_or(0));
        }
        self.panel.take(event);
        if let Some(bar) = &self.bar {
            bar.set_message(self.panel.line(width()));
        }
    }

    fn progress(&mut self, done: u64, total: u64) {
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        if self.show != Show::Lines || dumb || !stdout().is_terminal() {
            return;
        }
        self.fit_bar();
        let bar = self.bar.get_or_insert_with(|| bar(total));
        bar.set_prefix(self.pace.words(Instant::now(), done, total));
        bar.set_position(done);
        if done >= total {
            bar.finish_and_clear();
            self.bar = None;
        }
    }

    fn interrupted(&mut self) -> bool {
        SIGNAL.load(Ordering::SeqCst) != 0
    }

    fn ends_at_checkpoint(&mut self) -> bool {
        AT_CHECKPOINT.load(Ordering::SeqCst)
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Width of the terminal in columns.
fn width() -> usize {
    usize::from(Term::stdout().size().1)
}

fn bar(total: u64) -> ProgressBar {
    let colour = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let part = if colour { "{wide_bar:.cyan/dim}" } else { "{wide_bar}" };
    let template = format!("{part} {{pos}}/{{len}} steps done · {{prefix}}\n{{msg}}");
    let style = ProgressStyle::with_template(&template).expect("the template is our own").progress_chars("━╸─");
    ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stdout_with_hz(DRAWS)).with_style(style)
}
