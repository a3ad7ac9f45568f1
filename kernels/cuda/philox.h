// Philox4x32-10 (Salmon et al. 2011) and the inverse normal distribution function (AS 241), operation
// by operation what essa_mpi/perturbation.py does. Nothing here may be fused or reordered.
#pragma once

#include "portable.h"

struct Block { uint32_t w[4]; };

ESSA_DEVICE Block philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key) {
    uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
    ESSA_UNROLL
    for (int round = 0; round < 10; ++round) {
        const uint32_t high_0 = multiply_high(0xD2511F53u, c0), low_0 = 0xD2511F53u * c0;
        const uint32_t high_1 = multiply_high(0xCD9E8D57u, c2), low_1 = 0xCD9E8D57u * c2;
        c0 = high_1 ^ c1 ^ k0;
        c1 = low_1;
        c2 = high_0 ^ c3 ^ k1;
        c3 = low_0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// Polynomial, highest power first: one product and one sum a step.
template <int N> ESSA_DEVICE double horner(const double (&coefficients)[N], double x) {
    double value = coefficients[0];
    ESSA_UNROLL
    for (int i = 1; i < N; ++i) value = add(mul(value, x), coefficients[i]);
    return value;
}

ESSA_DEVICE double natural_log(double x) {
    const double atanh_series[12] = {1.0 / 23, 1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13,
                                     1.0 / 11, 1.0 / 9,  1.0 / 7,  1.0 / 5,  1.0 / 3,  1.0};
    const int64_t bits = double_to_bits(x);
    double m = bits_to_double((bits & 0x000FFFFFFFFFFFFFll) | 0x3FF0000000000000ll);  // 1 <= m < 2
    double e = double((bits >> 52) - 1023);
    if (m > 0x1.6a09e667f3bcdp+0) {  // sqrt(2)
        m = mul(m, 0.5);
        e = add(e, 1.0);
    }
    const double s = divide(sub(m, 1.0), add(m, 1.0));
    const double series = mul(add(s, s), horner(atanh_series, mul(s, s)));
    return add(mul(e, 0x1.62e42feep-1), add(mul(e, 0x1.a39ef35793c76p-33), series));
}

ESSA_DEVICE double inverse_normal(double u) {
    const double centre_n[8] = {
        2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
        1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0};
    const double centre_d[8] = {
        5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
        5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0};
    const double tail_n[8] = {
        7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
        3.64784832476320460504e0,  5.76949722146069140550e0,  4.63033784615654529590e0,  1.42343711074968357734e0};
    const double tail_d[8] = {
        1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
        6.89767334985100004550e-1, 1.67638483018380384940e0,  2.05319162663775882187e0,  1.0};
    const double far_n[8] = {
        2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
        2.96560571828504891230e-1, 1.78482653991729133580e0,  5.46378491116411436990e0,  6.65790464350110377720e0};
    const double far_d[8] = {
        2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
        1.48753612908506148525e-2,  1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0};
    const double q = sub(u, 0.5);
    if (q <= 0.425 && q >= -0.425) {
        const double r = sub(0.180625, mul(q, q));
        return mul(q, divide(horner(centre_n, r), horner(centre_d, r)));
    }
    const double r = square_root(-natural_log(q < 0.0 ? u : sub(1.0, u)));
    const double value = r > 5.0 ? divide(horner(far_n, sub(r, 5.0)), horner(far_d, sub(r, 5.0)))
                                 : divide(horner(tail_n, sub(r, 1.6)), horner(tail_d, sub(r, 1.6)));
    return q < 0.0 ? -value : value;
}

// Two words -> ((top 52 of their 64 bits) + 1/2) 2^-52, exact.
ESSA_DEVICE double uniform(uint32_t low, uint32_t high) {
    const uint64_t word = uint64_t(high) << 32 | low;
    return mul(add(double(int64_t(word >> 12)), 0.5), 0x1p-52);
}
