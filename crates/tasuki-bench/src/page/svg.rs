//! Plots as SVG. Colours come from the page's style, so that they follow light and dark.

use std::fmt::Write as _;

use super::html::{Quantity, escape};

/// Whose a figure is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    Paper,
    Ours,
    Peer,
}

impl Who {
    fn class(self) -> &'static str {
        match self {
            Who::Paper => "paper",
            Who::Ours => "ours",
            Who::Peer => "peer",
        }
    }
}

/// A bar.
#[derive(Debug, Clone)]
pub struct Bar {
    pub label: String,
    pub who: Who,
    /// `None` where there is no figure.
    pub value: Option<f64>,
    /// Text of the value.
    pub shown: String,
}

/// Width of a plot, and of its labels, in its own units; about pixels on a wide screen.
const WIDTH: f64 = 860.0;
const LABELS: f64 = 330.0;
const VALUES: f64 = 130.0;
const LINE: f64 = 24.0;
const AXIS: f64 = 26.0;

/// A logarithmic scale over whole decades.
#[derive(Debug, Clone, Copy)]
struct Scale {
    /// The first and the last decade, as powers of ten.
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Scale {
    /// Makes the scale for these values; `None` if none can be drawn: zero, negative and endless ones cannot.
    fn over(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Option<Self> {
        let logs: Vec<f64> = values.filter(|value| can_be_drawn(*value)).map(f64::log10).collect();
        let low = logs.iter().copied().fold(f64::INFINITY, f64::min);
        let high = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = (low.floor(), high.ceil());
        (!logs.is_empty()).then(|| Scale { low, high: high.max(low + 1.0), from, to })
    }

    fn at(&self, value: f64) -> f64 {
        let part = (value.log10() - self.low) / (self.high - self.low);
        self.from + part * (self.to - self.from)
    }

    fn decades(&self) -> impl Iterator<Item = f64> + use<> {
        let high = self.high;
        std::iter::successors(Some(self.low), move |power| (power + 1.0 <= high).then_some(power + 1.0))
            .map(|power| 10_f64.powf(power))
    }
}

fn can_be_drawn(value: f64) -> bool {
    value.is_finite() && value > 0.0
}

fn begin(title: &str, height: f64) -> String {
    let title = escape(title);
    format!(
        "<figure><figcaption>{title}</figcaption><div class=\"wide\"><svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{title}\">"
    )
}

const END: &str = "</svg></div></figure>\n";

/// Draws bars one below the other, on a logarithmic scale, with figures in `unit`.
pub fn bars(title: &str, unit: &str, bars: &[Bar]) -> String {
    let values = bars.iter().filter_map(|bar| bar.value);
    let Some(scale) = Scale::over(values, LABELS, WIDTH - VALUES) else { return String::new() };
    let bottom = LINE * bars.len() as f64 + 4.0;
    let mut svg = begin(title, bottom + AXIS);
    for decade in scale.decades() {
        let (x, text) = (scale.at(decade), escape(&Quantity::new(decade, unit).exact()));
        let _ = write!(svg, "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"0\" y2=\"{bottom:.1}\"/>");
        let _ = write!(
            svg,
            "<text class=\"tick\" x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{text}</text>",
            bottom + 18.0
        );
    }
    for (number, bar) in bars.iter().enumerate() {
        let top = LINE * number as f64 + 4.0;
        let middle = top + LINE * 0.66;
        let label = escape(&bar.label);
        let _ = write!(svg, "<text x=\"{:.1}\" y=\"{middle:.1}\" text-anchor=\"end\">{label}</text>", LABELS - 10.0);
        // A figure of zero has no place on the scale; its number stands at the edge.
        let end =
            bar.value.filter(|value| can_be_drawn(*value)).map_or(LABELS, |value| scale.at(value).max(LABELS + 2.0));
        let (class, width) = (bar.who.class(), end - LABELS);
        if width > 0.0 {
            let _ = write!(
                svg,
                "<rect class=\"{class}\" x=\"{LABELS}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{:.1}\"/>",
                top + 3.0,
                LINE - 7.0
            );
        }
        let _ =
            write!(svg, "<text class=\"value\" x=\"{:.1}\" y=\"{middle:.1}\">{}</text>", end + 6.0, escape(&bar.shown));
    }
    svg + END
}

/// A curve: values by the place on the axis below, where there are some.
#[derive(Debug, Clone)]
pub struct Curve {
    pub label: String,
    pub who: Who,
    /// Whether to draw it broken, as a bound or as a second curve of the same kind.
    pub is_broken: bool,
    pub values: Vec<Option<f64>>,
}

/// Draws curves over `places`, with equal distances between them, on a logarithmic scale of `unit`.
pub fn curves(title: &str, places: &[u32], of_places: &str, unit: &str, curves: &[Curve]) -> String {
    let (top, bottom, left, right) = (12.0, 260.0, 130.0, WIDTH - 250.0);
    let values = curves.iter().flat_map(|curve| curve.values.iter().copied().flatten());
    let Some(scale) = Scale::over(values, bottom, top) else { return String::new() };
    let x = |number: usize| left + (right - left) * (number as f64 + 0.5) / places.len().max(1) as f64;
    let mut svg = begin(title, bottom + 2.0 * AXIS);
    for decade in scale.decades() {
        let (y, text) = (scale.at(decade), escape(&Quantity::new(decade, unit).exact()));
        let _ = write!(svg, "<line class=\"grid\" x1=\"{left}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>");
        let _ = write!(
            svg,
            "<text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
            left - 8.0,
            y + 4.0
        );
    }
    for (number, place) in places.iter().enumerate() {
        let _ = write!(
            svg,
            "<text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{place}</text>",
            x(number),
            bottom + 18.0
        );
    }
    let _ = write!(
        svg,
        "<text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
        (left + right) / 2.0,
        bottom + 40.0,
        escape(of_places)
    );
    for (curve, label_at) in curves.iter().zip(label_places(curves, &scale)) {
        let points: Vec<_> = (0..)
            .zip(&curve.values)
            .filter_map(|(number, value)| {
                value.filter(|value| can_be_drawn(*value)).map(|value| (x(number), scale.at(value)))
            })
            .collect();
        let (class, broken) = (curve.who.class(), if curve.is_broken { " broken" } else { "" });
        let line: String = points.iter().map(|(x, y)| format!("{x:.1},{y:.1} ")).collect();
        let _ = write!(svg, "<polyline class=\"{class}{broken}\" points=\"{}\"/>", line.trim_end());
        for (x, y) in &points {
            let _ = write!(svg, "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\"/>");
        }
        if let Some(y) = label_at {
            let _ = write!(
                svg,
                "<text class=\"{class}\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                right + 8.0,
                y + 4.0,
                escape(&curve.label)
            );
        }
    }
    svg + END
}

/// Returns the heights of the curves' labels: that of the last point of each, moved apart where they would overlap.
fn label_places(curves: &[Curve], scale: &Scale) -> Vec<Option<f64>> {
    const APART: f64 = 17.0;
    let last = |curve: &Curve| curve.values.iter().rev().flatten().copied().find(|value| can_be_drawn(*value));
    let mut places: Vec<_> = curves.iter().map(|curve| last(curve).map(|value| scale.at(value))).collect();
    let mut order: Vec<_> = (0..places.len()).filter(|number| places[*number].is_some()).collect();
    order.sort_by(|a, b| f64::total_cmp(&places[*a].unwrap_or(0.0), &places[*b].unwrap_or(0.0)));
    let mut above = f64::NEG_INFINITY;
    for number in order {
        let place = places[number].map(|place| place.max(above + APART));
        above = place.unwrap_or(above);
        places[number] = place;
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(value: Option<f64>) -> Bar {
        Bar { label: "a <label>".into(), who: Who::Ours, value, shown: "some <value>".into() }
    }

    #[test]
    fn what_cannot_be_drawn_leaves_the_rest_as_it_is() {
        let odd = [Some(f64::NAN), Some(f64::INFINITY), Some(0.0), Some(-1.0), None];
        assert_eq!(bars("empty", "ns", &odd.map(bar)), "", "nothing can be drawn");
        let plot = bars("some", "ns", &[&odd.map(bar)[..], &[bar(Some(10.0))]].concat());
        assert!(!plot.contains("NaN") && !plot.contains("inf"), "{plot}");
        assert_eq!((plot.matches("<rect").count(), plot.matches("some &lt;value&gt;").count()), (1, 6), "{plot}");

        let curve = |values: &[Option<f64>]| Curve {
            label: "<c>".into(),
            who: Who::Peer,
            is_broken: false,
            values: values.to_vec(),
        };
        let plot =
            curves("some", &[64, 128, 256, 512, 1024], "bytes", "ns", &[curve(&odd), curve(&[Some(10.0), Some(20.0)])]);
        assert!(!plot.contains("NaN") && !plot.contains("inf"), "{plot}");
        assert_eq!((plot.matches("<circle").count(), plot.matches("&lt;c&gt;").count()), (2, 1), "{plot}");
        assert_eq!(curves("none", &[64], "bytes", "ns", &[curve(&odd)]), "");
    }

    #[test]
    fn a_scale_has_whole_decades() {
        let scale = Scale::over([25.0, 2_000.0].into_iter(), 0.0, 300.0).unwrap();
        assert_eq!(scale.decades().collect::<Vec<_>>(), [10.0, 100.0, 1_000.0, 10_000.0]);
        assert!((scale.at(100.0) - 100.0).abs() < 1e-9);
        let alone = Scale::over([10.0].into_iter(), 0.0, 300.0).unwrap();
        assert_eq!(alone.decades().count(), 2, "one value has a scale, too");
    }

    #[test]
    fn labels_do_not_lie_on_each_other() {
        let curve = |value| Curve { label: String::new(), who: Who::Ours, is_broken: false, values: vec![Some(value)] };
        let scale = Scale::over([1.0, 10.0].into_iter(), 200.0, 0.0).unwrap();
        let places: Vec<_> =
            label_places(&[curve(2.0), curve(2.01), curve(10.0)], &scale).into_iter().flatten().collect();
        assert!(places[0] - places[1] >= 17.0 && places[2] < places[1], "{places:?}");
    }
}
