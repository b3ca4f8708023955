//! Rows as a self-contained HTML page: no script, no font, no network.
//!
//! Light or dark by the reader's settings, in one column on a narrow screen. Knows HTML, not where the page is stored.

use super::picture::corners;
use super::row::{ShownRow, ShownToken, count, trained, visible};
use super::shown_image::ShownImage;

const STYLE: &str = "\
:root{color-scheme:light dark;--given:#5c6370;--shade:#0000000d;--trained:#0b6b2e;--mark:#c9f2d3;--line:#d5d9e0}
@media(prefers-color-scheme:dark){:root{--given:#9aa3b2;--shade:#ffffff14;--trained:#b9f6ca;--mark:#12512b;--line:#3b4252}}
body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:0 auto;padding:1rem}
h1{font-size:1.4rem}h2{font-size:1rem;margin:1.5rem 0 .3rem;border-top:2px solid var(--line);padding-top:.6rem}
pre{overflow-x:auto;font-size:.8rem}
.d{border:1px solid var(--line);border-radius:.4rem;padding:.5rem;margin:.4rem 0;font:.9rem/1.7 ui-monospace,monospace;\
white-space:pre-wrap;overflow-wrap:anywhere;color:var(--given)}
.d b{display:block;font:.75rem system-ui,sans-serif}
.d i{font-style:normal}.d i:nth-of-type(even){background:var(--shade)}
.d .t{color:var(--trained);background:var(--mark);box-shadow:inset 1px 0 var(--trained)}
.d .t:nth-of-type(even){background:var(--mark)}
.d .w{text-decoration:underline dotted}
figure{display:inline-block;margin:.3rem .6rem .3rem 0;vertical-align:top;max-width:100%}
figcaption{font:.75rem system-ui,sans-serif;max-width:16rem;overflow-wrap:anywhere}
svg{max-width:100%;height:auto;background:var(--shade)}
svg .o{fill:none;stroke:#ff2d55;stroke-width:2}
svg text{font:600 12px system-ui,sans-serif;fill:#fff;stroke:#000;stroke-width:3px;paint-order:stroke}";

/// Boxes that are drawn in an image, at most.
const MOST_BOXES: usize = 100;

/// The page. `table` is what the data check says; `rows` are numbered from 1.
pub fn page(title: &str, table: &str, rows: &[ShownRow]) -> String {
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width,initial-scale=1\">\n<title>{title}</title><style>{STYLE}</style></head><body>\n\
         <h1>{title}</h1>\n<pre>{}</pre>\n<div class=\"d\"><i class=\"t\">trained</i> <i class=\"t w\">with another weight \
         than 1</i> <i>given</i><i> to</i><i>kens</i>; a box is a document, which sees no other. Number and weight of a \
         token: point at it.</div>\n",
        escaped(table),
        title = escaped(title),
    );
    for (i, row) in rows.iter().enumerate() {
        let all = row.documents.iter().map(|document| trained(document)).sum::<usize>();
        let (number, tokens, padding) = (i + 1, row.len(), row.padding);
        out.push_str(&format!("<h2>Row {number}: {tokens} tokens, {all} trained, {padding} of padding</h2>\n"));
        for (d, document) in row.documents.iter().enumerate() {
            let numbers = format!("{} tokens, {} trained", count(document), trained(document));
            let verdict = row.verdicts.get(d).copied().unwrap_or_default();
            out.push_str(&format!("<div class=\"d\"><b>document {}{verdict}: {numbers}</b>", d + 1));
            let images = row.images.get(d).into_iter().flatten().enumerate();
            images.for_each(|(number, image)| figure(&mut out, number + 1, image));
            document.iter().for_each(|token| push(&mut out, token));
            out.push_str("</div>\n");
        }
    }
    out.push_str("</body></html>\n");
    out
}

/// An image with the boxes of its objects; its caption alone where it has no small copy.
fn figure(out: &mut String, number: usize, image: &ShownImage) {
    let objects = image.objects();
    let mut caption = image.caption(number);
    out.push_str("<figure>");
    if let Some(copy) = &image.copy {
        let [height, width] = copy.size;
        out.push_str(&format!(
            "<svg width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" role=\"img\">\
             <image href=\"{}\" width=\"{width}\" height=\"{height}\"/>",
            copy.uri
        ));
        for object in objects.iter().take(MOST_BOXES) {
            let [x, y] = corners(object, copy.size);
            let name = escaped(&object.name.chars().map(visible).collect::<String>());
            out.push_str(&match x.is_empty() && y.is_empty() {
                true => format!("<circle class=\"o\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\"/>", x.start, y.start),
                false => format!(
                    "<rect class=\"o\" x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\"/>",
                    x.start,
                    y.start,
                    x.end - x.start,
                    y.end - y.start
                ),
            });
            if !name.is_empty() {
                out.push_str(&format!(
                    "<text x=\"{:.1}\" y=\"{:.1}\">{name}</text>",
                    x.start + 3.0,
                    y.start.max(0.0) + 13.0
                ));
            }
        }
        out.push_str("</svg>");
        if objects.len() > MOST_BOXES {
            caption.push_str(&format!("; {MOST_BOXES} of {} objects are drawn", objects.len()));
        }
    } else {
        caption.push_str("; not drawn, as the page has pictures enough");
    }
    out.push_str(&format!("<figcaption>{}</figcaption></figure>", escaped(&caption)));
}

fn push(out: &mut String, token: &ShownToken) {
    let class = match token.weight {
        0.0 => "",
        1.0 => " class=\"t\"",
        _ => " class=\"t w\"",
    };
    let weight = if token.weight == 0.0 { String::new() } else { format!(", weight {}", token.weight) };
    out.push_str(&format!("<i{class} title=\"{}{weight}\">", token.id));
    for c in token.text.chars() {
        out.push_str(&escaped(visible(c).encode_utf8(&mut [0; 4])));
        if c == '\n' {
            out.push('\n');
        }
    }
    out.push_str("</i>");
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_the_data_are_no_markup() {
        let token = |text: &str, weight| ShownToken { id: 7, text: text.to_owned(), weight, times: 1 };
        let document = vec![token("<script>&\"", 0.0), token("a\nb", 1.0), token("c", 0.5)];
        let page = page("a <b>", "x < y", &[ShownRow { documents: vec![document], padding: 1, ..ShownRow::default() }]);
        assert!(page.contains("<i title=\"7\">&lt;script&gt;&amp;&quot;</i>"), "{page}");
        assert!(page.contains("<i class=\"t\" title=\"7, weight 1\">a↵\nb</i>"), "{page}");
        assert!(page.contains("<i class=\"t w\" title=\"7, weight 0.5\">c</i>"), "{page}");
        assert!(page.contains("Row 1: 4 tokens, 2 trained, 1 of padding"), "{page}");
        assert!(!page.contains("<script") && !page.contains("http") && page.contains("a &lt;b&gt;"));
    }
}
