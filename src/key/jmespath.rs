//! JMESPath in key expressions (feature `jmespath`).
//!
//! The evaluator is the `jmespath` crate's. It computes with doubles and is made for
//! looking around in data, where a part that is not there is no trouble; a key that has
//! lost a part is. So what it would round or leave out is an error here:
//!
//! * Integers within 64 bits come through exactly. Others, and whatever was computed, it
//!   holds as doubles, which are refused as a key and as the argument of `to_string`.
//! * A projection (`items[*].sku`) silently leaves out the elements that have nothing
//!   there. Here that is an error, unless a filter says so (`items[?sku].sku`).
//! * `to_string` of null is not `"null"`, one key for all, but an error.
//! * An expression that gives every message the same key (`'orderId'` in quotes, or
//!   `orderId || 'none'`) is refused when it is read, as are unknown functions.

use std::io::Read;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, LazyLock};

use base64::alphabet;
use base64::engine::{DecodePaddingMode, Engine as _, GeneralPurpose, GeneralPurposeConfig};
use jmespath::ast::Ast;
use jmespath::functions::{ArgumentType, CustomFunction, Signature, ToStringFn};
use jmespath::{Context, ErrorReason, JmespathError, Rcvar, Runtime, RuntimeError, Variable};

use super::value::from_text;
use super::{InvalidKeyExpression, KeyError};
use crate::json::{Json, Number};

/// Each of these may take the parser and the evaluator a level deeper, and a level is some
/// kilobytes of stack: unlimited, an expression could end the whole process.
const OPERATORS: [char; 11] = ['(', '[', '{', '!', '&', '.', '|', '*', '=', '<', '>'];
const MAX_OPERATORS: usize = 64;

/// A JMESPath expression that names one or more parts of the body.
#[derive(Debug, Clone)]
pub(super) struct Query {
    text: String,
    ast: Arc<Ast>,
}

impl PartialEq for Query {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for Query {}

impl Query {
    pub(super) fn parse(text: &str) -> Result<Self, InvalidKeyExpression> {
        let text = text.trim();
        let invalid = |offset: usize, problem: String| InvalidKeyExpression::Jmespath {
            expression: text.to_owned(),
            position: text.char_indices().take_while(|(index, _)| *index < offset).count() + 1,
            problem,
        };
        if text.is_empty() {
            return Err(invalid(0, "it is empty; write it as in `jmespath:order.id`".to_owned()));
        }
        if let Some((offset, _)) = text.match_indices(OPERATORS).nth(MAX_OPERATORS) {
            return Err(invalid(offset, format!("it has more than {MAX_OPERATORS} brackets and operators; use fewer")));
        }
        let mut ast = jmespath::parse(text).map_err(|error| invalid(error.offset, problem(&error)))?;
        check_functions(&mut ast).map_err(|(offset, problem)| invalid(offset, problem))?;
        if may_be_constant(&ast) {
            return Err(invalid(
                0,
                "it may give the same key to messages that have nothing to do with each other, because its value, or \
                 an alternative to it, is a constant; a name is written without quotes, or with \"double\" ones"
                    .to_owned(),
            ));
        }
        be_strict(&mut ast);
        Ok(Self { text: text.to_owned(), ast: Arc::new(ast) })
    }

    pub(super) fn as_str(&self) -> &str {
        &self.text
    }

    /// The text in a key of what the expression selects, never empty; `None` if that is
    /// null, or only nulls.
    pub(super) fn find(&self, body: &Json) -> Result<Option<String>, KeyError> {
        let failed = |problem| KeyError::Evaluation { part: self.part(None), problem };
        let mut context = Context::new(&self.text, &RUNTIME);
        // It is written by others, and does arithmetic with what the expression says.
        let search = || jmespath::interpret(&Rcvar::new(to_variable(body)), &self.ast, &mut context);
        let found = std::panic::catch_unwind(AssertUnwindSafe(search))
            .map_err(|_| failed("the evaluator panicked".to_owned()))?
            .map_err(|error| failed(problem(&error)))?;

        let unusable = |index, found| KeyError::Unusable { part: self.part(index), found };
        let items = match &*found {
            Variable::Null => return Ok(None),
            Variable::Array(items) => items,
            value => return from_variable(value).map(Some).map_err(|found| unusable(None, found)),
        };
        if items.is_empty() {
            return Err(unusable(None, "an empty array"));
        }
        if items.iter().all(|item| item.is_null()) {
            return Ok(None);
        }
        let mut text = String::new();
        for (index, item) in items.iter().enumerate() {
            if item.is_null() {
                return Err(KeyError::Partial { alternative: self.part(None), missing: self.part(Some(index)) });
            }
            if index > 0 {
                text.push(',');
            }
            text.push_str(&from_variable(item).map_err(|found| unusable(Some(index), found))?);
        }
        Ok(Some(text))
    }

    /// The expression, or that of one element of what it selects.
    fn part(&self, element: Option<usize>) -> String {
        match element {
            None => format!("jmespath:{}", self.text),
            Some(index) => format!("jmespath:{} | [{index}]", self.text),
        }
    }
}

fn from_variable(value: &Variable) -> Result<String, &'static str> {
    match value {
        Variable::String(text) => from_text(text),
        Variable::Number(number) if number.is_f64() => Err("a number that JMESPath does not hold exactly"),
        Variable::Number(number) => Ok(format!("={number}")),
        Variable::Bool(value) => Ok(format!("={value}")),
        Variable::Null => Err("null"),
        Variable::Array(_) => Err("an array"),
        Variable::Object(_) => Err("an object"),
        Variable::Expref(_) => Err("an expression"),
    }
}

fn to_variable(json: &Json) -> Variable {
    match json {
        Json::Null => Variable::Null,
        Json::Bool(value) => Variable::Bool(*value),
        Json::Number(number) => Variable::Number(to_number(number)),
        Json::String(text) => Variable::String(text.clone()),
        Json::Array(items) => Variable::Array(items.iter().map(|item| Rcvar::new(to_variable(item))).collect()),
        Json::Object(members) => Variable::Object(
            members.iter().map(|(name, value)| (name.clone(), Rcvar::new(to_variable(value)))).collect(),
        ),
    }
}

/// Exact for integers within 64 bits. All others are doubles, also those that are
/// integers, and known by that for what they are.
fn to_number(number: &Number) -> serde_json::Number {
    let text = number.to_string();
    if let Ok(integer) = text.parse::<i64>() {
        return integer.into();
    }
    if let Ok(integer) = text.parse::<u64>() {
        return integer.into();
    }
    let double: f64 = text.parse().unwrap_or(f64::MAX);
    serde_json::Number::from_f64(double.clamp(f64::MIN, f64::MAX)).unwrap_or_else(|| 0.into())
}

/// The functions that an expression may call.
static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    let mut runtime = Runtime::new();
    runtime.register_builtin_functions();
    let mut register = |name: &str, argument, function: fn(&Variable) -> Result<Variable, &'static str>| {
        let function = move |arguments: &[Rcvar], context: &mut Context<'_>| {
            let argument = arguments.first().map_or(&Variable::Null, |argument| &**argument);
            let result = function(argument).map(Rcvar::new);
            result.map_err(|problem| JmespathError::from_ctx(context, ErrorReason::Parse(problem.to_owned())))
        };
        let signature = Signature::new(vec![argument], None);
        runtime.register_function(name, Box::new(CustomFunction::new(signature, Box::new(function))));
    };
    register("powertools_json", ArgumentType::String, powertools_json);
    register("powertools_base64", ArgumentType::String, powertools_base64);
    register("powertools_base64_gzip", ArgumentType::String, powertools_base64_gzip);
    register("to_number", ArgumentType::Any, |value| Ok(number(value)));
    register(PRESENT, ArgumentType::Any, present);
    runtime.register_function("to_string", Box::new(to_string));
    runtime
});

/// The value of a text that is JSON.
fn powertools_json(text: &Variable) -> Result<Variable, &'static str> {
    let json = text.as_string().map(|text| Json::parse(text));
    match json {
        Some(Ok(json)) => Ok(to_variable(&json)),
        _ => Err("powertools_json was given a text that is not JSON, or ambiguous"),
    }
}

/// The text that is written in Base64.
fn powertools_base64(text: &Variable) -> Result<Variable, &'static str> {
    let bytes = from_base64(text).ok_or("powertools_base64 was given a text that is not Base64")?;
    let text = String::from_utf8(bytes).map_err(|_| "what powertools_base64 decoded is not UTF-8")?;
    Ok(Variable::String(text))
}

/// The text that is compressed with gzip and written in Base64.
fn powertools_base64_gzip(text: &Variable) -> Result<Variable, &'static str> {
    let bytes = from_base64(text).ok_or("powertools_base64_gzip was given a text that is not Base64")?;
    let mut text = String::new();
    flate2::read::GzDecoder::new(&*bytes)
        .take(MAX_DECOMPRESSED_BYTES + 1)
        .read_to_string(&mut text)
        .map_err(|_| "powertools_base64_gzip was given what is not a text in gzip")?;
    if text.len() as u64 > MAX_DECOMPRESSED_BYTES {
        return Err("what powertools_base64_gzip was given is over 1 MiB decompressed");
    }
    Ok(Variable::String(text))
}

/// As much as a message may hold uncompressed; a bomb costs its message and no memory.
const MAX_DECOMPRESSED_BYTES: u64 = 1024 * 1024;

fn from_base64(text: &Variable) -> Option<Vec<u8>> {
    /// Padding may be left out; anything else that is amiss is an error.
    const ENGINE: GeneralPurpose = GeneralPurpose::new(
        &alphabet::STANDARD,
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
    );

    text.as_string().and_then(|text| ENGINE.decode(text).ok())
}

/// JMESPath's `to_number`, exact.
fn number(value: &Variable) -> Variable {
    match value {
        Variable::Number(number) => Variable::Number(number.clone()),
        Variable::String(text) => match Json::parse(text) {
            Ok(Json::Number(number)) => Variable::Number(to_number(&number)),
            _ => Variable::Null,
        },
        _ => Variable::Null,
    }
}

/// JMESPath's `to_string`, of what has one text only.
fn to_string(arguments: &[Rcvar], context: &mut Context<'_>) -> jmespath::SearchResult {
    use jmespath::functions::Function as _;

    fn check(value: &Variable) -> Result<(), &'static str> {
        match value {
            Variable::Null => Err("to_string was given null, or something with null in it"),
            Variable::Number(number) if number.is_f64() => {
                Err("to_string was given a number that JMESPath does not hold exactly, or something with one in it")
            }
            Variable::Array(items) => items.iter().try_for_each(|item| check(item)),
            Variable::Object(members) => members.values().try_for_each(|value| check(value)),
            _ => Ok(()),
        }
    }

    arguments
        .iter()
        .try_for_each(|argument| check(argument))
        .map_err(|problem| JmespathError::from_ctx(context, ErrorReason::Parse(problem.to_owned())))?;
    ToStringFn::new().evaluate(arguments, context)
}

/// A function that no expression can name: its argument, which must not be null.
const PRESENT: &str = "element of a projection";

fn present(value: &Variable) -> Result<Variable, &'static str> {
    match value {
        Variable::Null => Err("an element has nothing there, and a projection would leave it out; \
                               if that is meant, say so with a filter, as in `items[?sku].sku`"),
        value => Ok(value.clone()),
    }
}

/// Wraps what projections collect into [`present`], wherever that has a part in the value.
fn be_strict(node: &mut Ast) {
    match node {
        // What decides about something else has no part in it.
        Ast::Comparison { .. } | Ast::Not { .. } => {}
        Ast::Condition { then, .. } => be_strict(then),
        Ast::Projection { lhs, rhs, .. } => {
            be_strict(lhs);
            let collected = match &mut **rhs {
                Ast::Condition { then, .. } => then,
                _ => rhs,
            };
            be_strict(collected);
            let inner = std::mem::replace(&mut **collected, Ast::Identity { offset: 0 });
            **collected = Ast::Function { offset: 0, name: PRESENT.to_owned(), args: vec![inner] };
        }
        node => children(node).into_iter().for_each(be_strict),
    }
}

/// Whether a message without any of the parts named may have a value all the same.
fn may_be_constant(node: &Ast) -> bool {
    match node {
        Ast::Literal { .. } => true,
        Ast::Or { lhs, rhs, .. } | Ast::And { lhs, rhs, .. } => may_be_constant(lhs) || may_be_constant(rhs),
        Ast::Subexpr { lhs, rhs, .. } => match &**rhs {
            Ast::Identity { .. } => may_be_constant(lhs),
            rhs => may_be_constant(rhs),
        },
        Ast::Function { name, args, .. } if name == "not_null" => args.iter().any(may_be_constant),
        Ast::Function { args, .. } => !args.is_empty() && args.iter().all(may_be_constant),
        Ast::MultiList { elements, .. } => !elements.is_empty() && elements.iter().all(may_be_constant),
        _ => false,
    }
}

/// Every function must be there and take so many arguments; the crate itself would say so
/// only when it gets there.
fn check_functions(node: &mut Ast) -> Result<(), (usize, String)> {
    if let Ast::Function { offset, name, args } = node {
        let Some(function) = RUNTIME.get_function(name) else {
            return Err((
                *offset,
                format!(
                    "there is no function `{name}`; besides those of JMESPath there are `powertools_json`, \
                     `powertools_base64` and `powertools_base64_gzip`"
                ),
            ));
        };
        // The number of arguments is the first thing that a function checks.
        let nulls: Vec<_> = args.iter().map(|_| Rcvar::new(Variable::Null)).collect();
        let tried = function.evaluate(&nulls, &mut Context::new("", &RUNTIME));
        if let Err(JmespathError {
            reason:
                ErrorReason::Runtime(
                    reason @ (RuntimeError::NotEnoughArguments { .. } | RuntimeError::TooManyArguments { .. }),
                ),
            ..
        }) = tried
        {
            return Err((*offset, format!("{name}: {reason}")));
        }
    }
    children(node).into_iter().try_for_each(check_functions)
}

fn children(node: &mut Ast) -> Vec<&mut Ast> {
    match node {
        Ast::Comparison { lhs, rhs, .. }
        | Ast::Projection { lhs, rhs, .. }
        | Ast::And { lhs, rhs, .. }
        | Ast::Or { lhs, rhs, .. }
        | Ast::Subexpr { lhs, rhs, .. } => vec![lhs, rhs],
        Ast::Condition { predicate, then, .. } => vec![predicate, then],
        Ast::Expref { ast: node, .. }
        | Ast::Flatten { node, .. }
        | Ast::Not { node, .. }
        | Ast::ObjectValues { node, .. } => vec![node],
        Ast::Function { args: nodes, .. } | Ast::MultiList { elements: nodes, .. } => nodes.iter_mut().collect(),
        Ast::MultiHash { elements, .. } => elements.iter_mut().map(|pair| &mut pair.value).collect(),
        Ast::Identity { .. } | Ast::Field { .. } | Ast::Index { .. } | Ast::Literal { .. } | Ast::Slice { .. } => {
            Vec::new()
        }
    }
}

/// What is wrong, on one line: types and words of the expression, no values.
fn problem(error: &JmespathError) -> String {
    let problem = match &error.reason {
        ErrorReason::Parse(problem) => problem.clone(),
        ErrorReason::Runtime(problem) => problem.to_string(),
    };
    problem.replace(char::is_control, " ")
}
