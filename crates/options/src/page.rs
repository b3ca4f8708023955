//! Option tables as Markdown: the reference page.

use crate::kind::{Choice, Kind};
use crate::row::{Row, join_doc};
use crate::table::Section;

/// All sections as one page below a title and an introduction.
pub fn reference_page(title: &str, introduction: &str, sections: &[Section]) -> String {
    let mut page = format!("# {title}\n\n{introduction}\n");
    for section in sections {
        page.push('\n');
        page.push_str(&section_page(section));
    }
    page
}

/// One section: heading, introduction, a table of its options, and below it one table for each group among them.
pub fn section_page(section: &Section) -> String {
    let mut page = format!(
        "## {}\n\n{}\n\n",
        section.title,
        section.about.iter().map(|line| line.trim()).collect::<Vec<_>>().join("\n").trim()
    );
    push_table(&mut page, section.rows, "");
    for row in section.rows.iter().filter(|row| !row.kind.rows().is_empty()) {
        let is_list = matches!(row.kind, Kind::List(_) | Kind::Nullable(Kind::List(_)));
        // Lists of the same group share one table, below the first of them.
        let first = section.rows.iter().find(|other| std::ptr::eq(other.kind.rows(), row.kind.rows()));
        if first.is_some_and(|first| first.name != row.name) {
            continue;
        }
        let heading = if is_list { format!("Each item of `{}`", row.name) } else { format!("Inside `{}`", row.name) };
        page.push_str(&format!("\n### {heading}\n\n"));
        push_table(&mut page, row.kind.rows(), if is_list { "" } else { row.name });
    }
    page
}

fn push_table(page: &mut String, rows: &[Row], group: &str) {
    page.push_str("| Option | Type | Default | Meaning |\n|---|---|---|---|\n");
    for row in rows {
        let name = if group.is_empty() { row.name.to_string() } else { format!("{group}.{}", row.name) };
        let default = if row.is_required() { "required".to_string() } else { format!("`{}`", row.default) };
        page.push_str(&format!("| `{name}` | {} | {default} | {} |\n", row.kind.short(), meaning(row)));
    }
}

fn meaning(row: &Row) -> String {
    let types: Vec<String> = row.owners().map(|owner| format!("`type: {owner}`")).collect();
    let mut parts: Vec<String> = row.owner.map(|_| format!("For {}.", types.join(", "))).into_iter().collect();
    parts.push(row.doc_text());
    let limits = row.limits.describe();
    if !limits.is_empty() {
        parts.push(format!("Allowed: {}.", limits.trim_start_matches([',', ' '])));
    }
    let words: Vec<String> = row.kind.choices().iter().map(|choice| choice_text(row, choice)).collect();
    if !words.is_empty() {
        parts.push(words.join("; ") + ".");
    }
    if let Some(most) = row.pending_over {
        parts.push(format!("*More than {most} is not available yet.*"));
    }
    if row.is_pending {
        parts.push("*Not available yet.*".into());
    }
    if row.changes_on_resume {
        parts.push("↻".into());
    }
    parts.join(" ").replace('|', "\\|")
}

fn choice_text(row: &Row, choice: &Choice) -> String {
    let aliases = match choice.aliases {
        [] => String::new(),
        aliases => {
            format!(" (also {})", aliases.iter().map(|alias| format!("`{alias}`")).collect::<Vec<_>>().join(", "))
        }
    };
    let pending = if row.pending_words.contains(&choice.name) { ", *not available yet*" } else { "" };
    format!("`{}`{aliases}: {}{pending}", choice.name, join_doc(choice.doc).trim_end_matches('.'))
}
